"""Prediction scores, computed from sums over draws."""
