"""From a fitted model to the two graphs that are served."""
