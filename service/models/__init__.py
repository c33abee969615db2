"""Loaded models, prepared draws, and drift detection on live rows."""
