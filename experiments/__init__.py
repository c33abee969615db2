"""The papers' tables and figures, certification of posteriors, and simulated active learning."""
