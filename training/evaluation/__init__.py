"""Evaluation and comparison of published versions."""
