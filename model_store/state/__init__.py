"""What the service must not forget: jobs, what was acquired, and labels."""
