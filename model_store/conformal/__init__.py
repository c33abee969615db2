"""Detectors, p-values, prediction sets, abstention and stopping."""
