"""Label Studio: what its projects and tasks mean to a model, and a client of its API."""
