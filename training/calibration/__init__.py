"""Calibration of the detectors and the temperature."""
