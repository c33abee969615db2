"""Measured quality, attacks, and the evaluation report."""
