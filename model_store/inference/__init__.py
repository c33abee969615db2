"""Inference with published versions."""
