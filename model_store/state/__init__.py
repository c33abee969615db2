"""Persistent state of the service, such as jobs, acquired rows and labels."""
