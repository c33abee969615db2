"""Jobs of the service and computations on data sets."""
