"""Errors as `application/problem+json` (RFC 9457), or as the path's protocol has them: one table
from errors to statuses, no echo of the input.
"""

import re
from functools import cache
from http import HTTPStatus
from traceback import clear_frames

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route

from model_store.errors import (
    BrokenArtifact,
    Conflict,
    DubitoError,
    InvalidInput,
    NoSpace,
    NotFound,
    OverQuota,
    StateUnusable,
    StoreUnreachable,
    UnsupportedFormat,
)
from service.call import record_of
from service.error_forms import is_of_others, problem
from service.errors import (
    InUse,
    NotAcceptable,
    NotDone,
    NotReady,
    Overloaded,
    PastDeadline,
    TooLarge,
    TooLargeToLoad,
    Unsupported,
)

STATUS: dict[type[DubitoError], int] = {
    InvalidInput: 422,
    Conflict: 409,
    NotFound: 404,
    BrokenArtifact: 503,
    UnsupportedFormat: 503,
    StoreUnreachable: 503,
    TooLargeToLoad: 503,
    InUse: 409,
    NotDone: 409,
    TooLarge: 413,
    Unsupported: 415,
    NotAcceptable: 406,
    Overloaded: 429,
    NotReady: 503,
    PastDeadline: 504,
    StateUnusable: 503,
    NoSpace: 507,
    OverQuota: 507,
}


def install(app: FastAPI) -> None:
    app.add_exception_handler(DubitoError, _domain_error)
    app.add_exception_handler(HTTPException, _http_error)


def domain_error(request: Request, error: Exception) -> Response:
    # They hold the body, in cycles through the future that the error came by
    clear_frames(error.__traceback__)
    code = record_of(request.scope).reason = _code(type(error).__name__)
    status = next((STATUS[kind] for kind in type(error).__mro__ if kind in STATUS), 500)
    headers = {"Retry-After": str(error.retry_after_s)} if isinstance(error, Overloaded) else None
    errors = [error, *error.others] if isinstance(error, InvalidInput) else []
    return problem(request.scope, status, code, str(error), headers, errors)


async def _domain_error(request: Request, error: Exception) -> Response:
    return domain_error(request, error)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    clear_frames(error.__traceback__)
    code = record_of(request.scope).reason = _code(HTTPStatus(error.status_code).phrase)
    headers = dict(error.headers or {})
    if error.status_code == 404:
        where = "docs/open-inference.md" if is_of_others(request.scope["path"]) else "GET /docs"
        detail = f"path: expected one of those that {where} lists, got one that is not there"
    elif error.status_code == 405:
        allowed = _methods_of(request) or headers.get("Allow", "another")
        headers["Allow"] = allowed
        detail = f"method: expected {allowed}, got {request.method}"
    else:
        detail = str(error.detail)
    return problem(request.scope, error.status_code, code, detail, headers)


def _methods_of(request: Request) -> str:
    routes: list[Route] = request.app.state.routes
    matching = [route for route in routes if route.matches(request.scope)[0] != Match.NONE]
    methods = {method for route in matching for method in route.methods or ()}
    return ", ".join(sorted(methods | ({"HEAD"} if "GET" in methods else set())))


@cache
def _code(name: str) -> str:
    """Return a name as problems and metrics have it: `TooLarge` is `too_large`, `Not Found` is
    `not_found`."""
    return re.sub(r"(?<=[a-z]) ?(?=[A-Z])", "_", name).lower()
