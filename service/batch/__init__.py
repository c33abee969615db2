"""Batch work on rows in files: jobs of the service and whole data sets, here or on Ray."""
