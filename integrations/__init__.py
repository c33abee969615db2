"""Integrations with other protocols and programs. Each has its own folder."""
