"""From what a caller sends to rows of numbers."""
