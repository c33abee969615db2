"""Measured quality, attacks, and the evidence card."""
