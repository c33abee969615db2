"""Processes, connections and signals."""
