"""The papers' tables and figures, and ours: a module for each, found by being here."""
