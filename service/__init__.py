"""A prediction service with Bayesian uncertainty estimates."""
