"""Jobs, and scoring and ranking of data sets."""
