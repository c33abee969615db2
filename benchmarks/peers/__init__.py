"""Compare the service with other servers of the same model."""
