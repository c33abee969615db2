"""Readers: from request bodies and files to rows of numbers."""
