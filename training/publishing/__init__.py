"""Publication of fitted models as versions."""
