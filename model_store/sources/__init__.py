"""Readers that convert request bodies and files to numeric rows."""
