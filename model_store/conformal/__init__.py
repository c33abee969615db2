"""Conformal methods, e.g. detectors, p-values, prediction sets and abstention."""
