"""Integrations with other protocols and programs, found by entry points.

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
    """The additions of a package to the service. Objects are named as `module:object`.

    Attributes:
        router: an `APIRouter`. Each route must declare its scope. If the protocol defines a form of
            errors, register an `ErrorForm` of `service.api.problems`.
        short_paths: paths of POST routes that are as frequent as `/predict`. They are called
            directly, with the request and the parameters of the path.
        health_paths: paths that are answered even if there are too many connections.
        add_commands: adds commands to `dubito` and `python -m service`.
        variables: environment variables of the package, `DUBITO_...`.
        run_shards: a function that computes the shards of `dubito score` and `rank` elsewhere.
    """

    router: str | None = None
    short_paths: Sequence[str] = ()
    health_paths: Sequence[str] = ()
    add_commands: Callable[[Commands], None] = lambda _: None
    variables: Sequence[str] = ()
    run_shards: str | None = None


@cache
def installed_integrations() -> dict[str, Integration]:
    return {point.name: point.load() for point in sorted(entry_points(group=GROUP))}


def integration_variables() -> set[str]:
    integrations = installed_integrations().values()
    return {name for integration in integrations for name in integration.variables}
