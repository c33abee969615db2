"""Reproduce the papers' results, certify posteriors and simulate active learning."""
