"""Shared helpers of the commands."""

from typing import Any

from model_store.artifacts.store import ModelStore, store_from_environment


def open_store(writes: bool = True) -> ModelStore:
    store = store_from_environment()
    if writes:
        store.storage.check_writable()  # Fail now, not after hours of training.
    return store


def print_quality(quality: dict[str, Any]) -> None:
    for key, value in quality.items():
        print(f"  {key:32} {format_figure(value)}")


def format_figure(value: float) -> str:
    """Format a number with four decimals, or with four significant digits if it is small."""
    return f"{value:.4f}" if abs(value) >= 1e-3 or value == 0 else f"{value:.4g}"
