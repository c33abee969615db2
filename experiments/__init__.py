"""Reproduction of the papers' results, certification of posteriors, and active learning."""
