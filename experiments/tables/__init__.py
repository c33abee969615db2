"""The papers' tables and figures, a module for each."""
