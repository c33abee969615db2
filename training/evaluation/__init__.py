"""Evaluate and compare published versions."""
