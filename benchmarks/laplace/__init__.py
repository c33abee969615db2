"""`laplace` beside laplace-torch: the same weights, rows and structures."""
