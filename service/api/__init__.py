"""HTTP routes, request and response models, and error responses."""
