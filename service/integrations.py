"""Integrations: other people's protocols and programs, found by entry points.

Each entry point of the group `dubito.integrations` names an `Integration`; `integrations/` has
ours. Modules are imported when they are needed, so that `dubito --help` is fast.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from typing import TypeAlias

GROUP = "dubito.integrations"

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


@dataclass(frozen=True)
class Integration:
    """What a package adds to the service. Objects are named as `module:object`.

    Attributes:
        router: an `APIRouter`. Each of its routes declares the scope that it needs. A protocol with
            its own form of errors registers an `ErrorForm` of `service.api.problems`.
        short_paths: paths of its POST routes that are as frequent as `/predict`. They are called
            directly, with the request and the parameters of the path.
        health_paths: paths that are answered even if there are too many connections.
        add_commands: adds its commands to `dubito` and `python -m service`.
        variables: environment variables that it reads, `DUBITO_...`.
        run_shards: a function that does the shards of `dubito score` and `rank` elsewhere.
    """

    router: str | None = None
    short_paths: Sequence[str] = ()
    health_paths: Sequence[str] = ()
    add_commands: Callable[[Commands], None] = lambda _: None
    variables: Sequence[str] = ()
    run_shards: str | None = None


@cache
def installed_integrations() -> dict[str, Integration]:
    """Return the installed integrations by name."""
    return {point.name: point.load() for point in sorted(entry_points(group=GROUP))}


def integration_variables() -> set[str]:
    """Return the environment variables of all installed integrations."""
    return {name for one in installed_integrations().values() for name in one.variables}
