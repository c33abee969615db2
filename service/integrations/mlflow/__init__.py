"""MLflow's scoring protocol."""
