"""Code shared by training and the service, e.g. artifacts, inference, scores and calibration."""
