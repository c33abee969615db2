"""Integrations: other people's protocols and programs, found by entry points.

Each entry point of the group `dubito.integrations` names an `Integration`. Its functions import
what they need when they are called, so that `dubito --help` is fast.
"""

import argparse
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from typing import Any, TypeAlias

GROUP = "dubito.integrations"

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def _add_none(_: Commands) -> None:
    pass


@dataclass(frozen=True)
class Integration:
    """What a package adds to the service."""

    add_commands: Callable[[Commands], None] = _add_none
    run_shards: Callable[..., Generator[Any, None, None]] | None = None  # see `service.batch`
    variables: Sequence[str] = ()  # environment variables that it reads, `DUBITO_...`


def integration_variables() -> set[str]:
    """Return the environment variables of all installed integrations."""
    return {name for one in installed_integrations().values() for name in one.variables}


@cache
def installed_integrations() -> dict[str, Integration]:
    """Return the installed integrations by name."""
    return {point.name: point.load() for point in sorted(entry_points(group=GROUP))}
