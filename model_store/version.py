"""The version of Dubito, which `pyproject.toml` reads."""

VERSION = "0.1.0"
