"""Integrations: other people's protocols and programs, found by entry points.

Each entry point of the group `dubito.integrations` names an `Integration`; `integrations/` has
ours. Its functions import what they need when they are called, so that `dubito --help` is fast.
"""

import argparse
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from fastapi import APIRouter

GROUP = "dubito.integrations"

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


@dataclass(frozen=True)
class Integration:
    """What a package adds to the service; it gives what it has.

    Attributes:
        routers: returns its routes. Each route declares the scope that it needs. A protocol that
            writes errors in its own form registers an `ErrorForm` of `service.api.problems`.
        short_paths: paths of its POST routes that are as frequent as `/predict`. They are called
            directly, with the request and the parameters of the path.
        health_paths: paths that are answered even if there are too many connections.
        add_commands: adds its commands to `dubito` and `python -m service`.
        variables: environment variables that it reads, `DUBITO_...`.
        run_shards: does the shards of `dubito score` and `rank` elsewhere.
    """

    routers: "Callable[[], Sequence[APIRouter]]" = tuple
    short_paths: Sequence[str] = ()
    health_paths: Sequence[str] = ()
    add_commands: Callable[[Commands], None] = lambda _: None
    variables: Sequence[str] = ()
    run_shards: Callable[..., Generator[Any, None, None]] | None = None


@cache
def installed_integrations() -> dict[str, Integration]:
    """Return the installed integrations by name."""
    return {point.name: point.load() for point in sorted(entry_points(group=GROUP))}


def integration_variables() -> set[str]:
    """Return the environment variables of all installed integrations."""
    return {name for one in installed_integrations().values() for name in one.variables}
