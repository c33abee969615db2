"""Prediction service with Bayesian uncertainty."""
