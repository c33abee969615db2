"""Plug-ins for other protocols and programs.

Each entry point of the group `dubito.integrations` refers to an `Integration`. Modules are imported
on demand, so that `dubito --help` is fast.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points

from model_store.commands import Commands

GROUP = "dubito.integrations"


@dataclass(frozen=True)
class Integration:
    """A package's extensions to the service.

    Attributes:
        router: an `APIRouter`, as `module:object`. Each route must declare its scope. If the
            protocol defines an error format, register an `ErrorForm` of `service.api.problems`.
        short_paths: paths of POST routes that are as frequent as `/predict`. They bypass most of
            FastAPI and receive the request and the path parameters.
        health_paths: paths that remain available if there are too many connections.
        add_commands: adds commands to `dubito` and `python -m service`.
        variables: environment variables of the package, `DUBITO_...`.
        run_shards: a function, as `module:object`, that processes the shards of `dubito score` and
            `dubito rank`, for example on a cluster.
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
