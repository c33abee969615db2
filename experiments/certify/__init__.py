"""Compare approximate posteriors with exact ones and Hamiltonian Monte Carlo."""
