"""The serving engine."""
