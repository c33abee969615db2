"""Choosing from a pool the rows that are most worth a label."""
