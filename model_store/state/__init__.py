"""The service's persistent state, such as jobs, acquired rows and labels."""
