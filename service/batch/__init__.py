"""Background jobs and commands that score or rank data sets."""
