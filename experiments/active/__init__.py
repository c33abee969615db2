"""Simulated active learning: rows with known labels, which a simulation reveals in batches."""
