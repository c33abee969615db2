"""Versions on disk: files, manifest, evidence."""
