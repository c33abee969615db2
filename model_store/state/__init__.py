"""The service's durable state: jobs, acquired rows and labels."""
