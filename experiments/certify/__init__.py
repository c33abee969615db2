"""Comparisons with exact posteriors and with Hamiltonian Monte Carlo."""
