"""Integrations with other protocols and programs, one folder each."""
