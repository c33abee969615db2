"""The scopes of API keys and routes.

Every route declares its scope with `dependencies=[needs("read")]`, or is public with
`[OPEN_TO_ALL]`. The service does not start if a route declares neither.
"""

from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

from fastapi import Depends, Request
from fastapi.routing import APIRoute
from starlette.types import Scope as AsgiScope

from service.errors import Forbidden, Unauthorized
from service.request_context import get_record
from service.server.shares import KEY_NAME

Scope = Literal["read", "predict", "acquire", "label", "rows", "metrics", "admin"]
SCOPES: Final[tuple[Scope, ...]] = get_args(Scope)
API_SCOPES: Final = frozenset(SCOPES) - {"admin"}  # for keys in DUBITO_API_KEYS
ADMIN_SCOPES: Final = frozenset[Scope]({"admin", "metrics", "read"})

# The middleware sets these keys of a request's ASGI scope.
SCOPES_KEY = "dubito.scopes"
MODELS_KEY = "dubito.models"  # names, or None for all
POOLS_KEY = "dubito.pools"  # paths in DUBITO_POOLS, or None for all

REALM = 'Bearer realm="dubito"'


def authorize(scope: AsgiScope, needed: Scope) -> None:
    """Check that a key has a scope. Only the log distinguishes unknown and expired keys."""
    if needed in scope[SCOPES_KEY]:
        return
    if KEY_NAME not in scope:
        record = get_record(scope)
        if record.key is not None:
            record.reason = "expired_key"
        raise Unauthorized(REALM)
    error = Forbidden("key", f"a key with the scope {needed}", "a key without it")
    challenge = f'{REALM}, error="insufficient_scope", scope="{needed}"'
    error.headers = {"WWW-Authenticate": challenge}
    raise error


@dataclass(frozen=True)
class _Needs:
    scope: Scope

    async def __call__(self, request: Request) -> None:
        authorize(request.scope, self.scope)


async def _open_to_all() -> None: ...


OPEN_TO_ALL: Any = Depends(_open_to_all)


def needs(scope: Scope) -> Any:
    """Declare the scope that a route needs if API keys are configured."""
    return Depends(_Needs(scope))


def needed_scope(route: APIRoute) -> Scope | None:
    """Return the scope that a route declares, or None if it is public."""
    for dependency in route.dependencies:
        if isinstance(dependency.dependency, _Needs):
            return dependency.dependency.scope
        if dependency.dependency is _open_to_all:
            return None
    raise AssertionError(f"{route.path}: add needs(...) or OPEN_TO_ALL to its dependencies")


def key_name(scope: AsgiScope) -> str | None:
    return scope.get(KEY_NAME)


def allowed_models(scope: AsgiScope) -> frozenset[str] | None:
    """Return the models that the request's key can use, or None for all."""
    return scope.get(MODELS_KEY)
