"""What processes that serve as one tell each other: workers of one supervisor, or replicas of a
cluster."""
