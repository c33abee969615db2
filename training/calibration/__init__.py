"""Calibration of a model as it is served."""
