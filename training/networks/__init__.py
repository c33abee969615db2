"""Networks as functions of an input and theta, made of any module."""
