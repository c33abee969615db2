"""Posteriors held against exact ones and Hamiltonian Monte Carlo, a module for each comparison."""
