"""Readers that convert request bodies and files to rows of numbers."""
