"""Publish fitted models as versions."""
