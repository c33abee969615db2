"""Prediction scores, which are computed from sums over draws."""
