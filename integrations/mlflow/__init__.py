"""MLflow: its scoring protocol, and versions exported as its models."""
