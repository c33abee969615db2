"""Selection of the most useful rows to label from a pool."""
