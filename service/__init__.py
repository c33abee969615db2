"""Prediction service with Bayesian uncertainty."""

VERSION = "0.1.0"
