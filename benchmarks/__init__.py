"""Benchmarks of speed, memory and statistical guarantees."""
