"""Errors as `application/problem+json` (RFC 9457), or as the path's protocol has them, without an
echo of the input; and `GET /problems`: their kinds, where their `type` leads.

`python -m service.api.reference` writes the kinds into docs/problems.md.
"""

import re
from functools import cache
from html import escape
from http import HTTPStatus
from traceback import clear_frames

from fastapi import APIRouter, FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route

from model_store.errors import DubitoError, InvalidInput
from service.call import record_of
from service.error_forms import PROBLEMS, is_of_others, problem
from service.errors import Overloaded

# By code, the name of an error's class: the status, what it means, and what to do
KINDS = {
    "invalid_input": (422, "a field is not as it should be", "correct what `errors` names"),
    "unauthorized": (401, "a key is needed, and none that is valid came", "send one"),
    "forbidden": (
        403,
        "the key lacks the scope that `detail` names, or another site's page asks (421: by a name "
        "that `DUBITO_HOSTS` does not have)",
        "ask for a key with that scope",
    ),
    "not_found": (404, "no such model, version, job, file or path", "`GET /models`"),
    "method_not_allowed": (405, "the path takes another method", "use one named in `Allow`"),
    "not_acceptable": (
        406,
        "`Accept` names no media type that the answer could have",
        "name `application/json`, or none",
    ),
    "in_use": (409, "a version that is served cannot be unloaded", "move the alias first"),
    "not_done": (409, "a job is not over, or what was asked cannot be done here", "as `detail`"),
    "conflict": (409, "a label goes against one that was kept", "send it with `replace`"),
    "too_large": (413, "more than a limit allows", "send less at once, or raise the limit"),
    "unsupported": (
        415,
        "a media type or an encoding that the service does not read",
        "send JSON, npy or a form",
    ),
    "overloaded": (
        429,
        "too much work is waiting, and the client has its share of it",
        "try again after `Retry-After` seconds",
    ),
    "unexpected": (
        500,
        "an error that Dubito did not expect",
        "look for `X-Request-ID` in the log",
    ),
    "not_ready": (503, "there is nothing to predict with yet", "publish a model, or wait"),
    "broken_artifact": (503, "the files of a version are damaged", "publish it again"),
    "unsupported_format": (503, "a version of a newer format", "update the service"),
    "store_unreachable": (503, "the bucket of the store cannot be reached", "try again"),
    "too_large_to_load": (503, "a version takes more memory than there may be", "raise the limit"),
    "out_of_memory": (
        503,
        "the model takes more memory for these rows than it may",
        "send another number of rows, or raise `DUBITO_TRIAL_BYTES`",
    ),
    "state_unusable": (503, "jobs and labels cannot be read or written", "see the log"),
    "past_deadline": (504, "no answer by the deadline", "ask for less, or for longer"),
    "no_space": (507, "the disk is full", "make room"),
    "over_quota": (507, "the results of a key's jobs take too much", "delete jobs"),
}

router = APIRouter(include_in_schema=False)


def install(app: FastAPI) -> None:
    app.add_exception_handler(DubitoError, _domain_error)
    app.add_exception_handler(HTTPException, _http_error)


def domain_error(request: Request, error: Exception) -> Response:
    # They hold the body, in cycles through the future that the error came by
    clear_frames(error.__traceback__)
    code = record_of(request.scope).reason = _code(type(error).__name__)
    codes = (_code(kind.__name__) for kind in type(error).__mro__)
    status = next((KINDS[code][0] for code in codes if code in KINDS), 500)
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


@router.get(PROBLEMS)
async def get_problems() -> Response:
    rows = "".join(
        f'<dt id="{code}"><code>{code}</code> ({status})</dt>'
        f"<dd>{escape(means.replace('`', ''))}. To do: {escape(do.replace('`', ''))}.</dd>"
        for code, (status, means, do) in KINDS.items()
    )
    page = f'<!DOCTYPE html><html lang="en"><title>Problems</title><dl>{rows}</dl></html>'
    headers = {"Content-Security-Policy": "default-src 'none'"}
    return Response(page, media_type="text/html; charset=utf-8", headers=headers)


def problem_table() -> str:
    rows = [
        f"| `{code}` | {status} | {means} | {do} |" for code, (status, means, do) in KINDS.items()
    ]
    return "\n".join(["| Code | Status | Means | Do |", "|---|---|---|---|", *rows])
