"""Integrations with other protocols and programs, each in a folder of its own."""
