"""Simulations of active learning on labelled data."""
