"""Simulate active learning on labelled data."""
