"""A simulation of many replicas, checked against a few, and what it says of many."""
