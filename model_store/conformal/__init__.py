"""Conformal methods: detectors, p-values, prediction sets and abstention."""
