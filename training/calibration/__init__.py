"""Calibration of detectors and of the temperature."""
