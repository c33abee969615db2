"""Code shared by training and the service: artifacts, inference, scores and calibration."""
