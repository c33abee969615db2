"""What the commands share: the store of the environment, and options. They parse and print; what
they do is in the rooms that they call."""

import argparse
from typing import Any, TypeAlias

from model_store.artifacts.place import store_of_environment
from model_store.artifacts.store import ModelStore

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def open_store(writes: bool = True) -> ModelStore:
    store = store_of_environment()
    if writes:
        store.storage.check_writable()  # now, rather than when hours have gone by
    return store


def add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])


def add_anyway(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--anyway", action="store_true", help="publish also what is worse than a guess"
    )


def add_target(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--target", metavar="COLUMN", help="what to predict of csv: and parquet: data"
    )


def add_version(parser: argparse.ArgumentParser, name: str = "model") -> None:
    parser.add_argument(
        name, metavar="NAME[:VERSION]", help="VERSION is a number or an alias, by default latest"
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def print_quality(quality: dict[str, Any]) -> None:
    for key, value in quality.items():
        print(f"  {key:32} {show_figure(value)}")


def show_figure(value: float) -> str:
    """Four decimals, but of an error of targets near 1e-9 four digits."""
    return f"{value:.4f}" if abs(value) >= 1e-3 or value == 0 else f"{value:.4g}"
