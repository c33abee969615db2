"""Running the two graphs of a version."""
