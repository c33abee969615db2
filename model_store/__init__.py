"""What training and the service agree on: artifacts, their store, draws, predictive scores,
calibration."""
