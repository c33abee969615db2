"""Scores of predictions from sums over draws."""
