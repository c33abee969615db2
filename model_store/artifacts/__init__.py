"""Versions on disk: files, manifest, reports."""
