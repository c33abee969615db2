"""Neural networks as functions of an input and parameters theta."""
