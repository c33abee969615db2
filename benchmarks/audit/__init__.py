"""What is computed here, computed again by other people's implementations."""
