"""Loaded models, prepared draws, and the drift of live rows."""
