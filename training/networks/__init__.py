"""Networks as functions of an input and theta, converted from any module."""
