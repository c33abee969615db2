"""Networks as functions of an input and theta."""
