"""Error responses, as problem+json (RFC 9457) or in another protocol's format.

Error responses never repeat the input. `GET /problems` lists all codes, and the `type` of a problem
links to it. `python -m docs.reference` writes the same table to docs/problems.md.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from html import escape
from http import HTTPStatus
from inspect import getdoc
from traceback import clear_frames
from typing import Any

import orjson
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route
from starlette.types import Scope

from model_store.errors import (
    DubitoError,
    InvalidInput,
    NotFound,
    describe_value,
    expected_value,
    merge_errors,
)
from service.api.media_types import JSON, PROBLEM_JSON
from service.auth.scopes import OPEN_TO_ALL, REALM, SCOPES_KEY
from service.errors import MethodNotAllowed, RequestError, Unauthorized, to_utf8
from service.request_context import get_link_prefix, get_record

PROBLEMS = "/problems"


class FieldProblem(BaseModel):
    """An invalid field. `detail` gives the expected and received values."""

    field: str
    detail: str


class Problem(BaseModel):
    """An error (RFC 9457).

    `type` links to the description of `code`. `field` is null unless a field is invalid, and
    `errors` lists up to ten invalid fields.
    """

    type: str
    title: str
    status: int
    detail: str
    code: str
    field: str | None
    errors: list[FieldProblem]


router = APIRouter(include_in_schema=False, dependencies=[OPEN_TO_ALL])


@dataclass(frozen=True)
class ErrorForm:
    """Another protocol's error format, which uses status 400 instead of 422."""

    matches: Callable[[str], bool]  # tests a path
    content: Callable[[int, str], dict[str, str]]  # from status and detail
    guide: str  # page that lists the paths


_other_forms: list[ErrorForm] = []


def register_error_form(form: ErrorForm) -> None:
    if form not in _other_forms:
        _other_forms.append(form)


def other_form(path: str) -> ErrorForm | None:
    """Return the error format for a path, or None for problem+json."""
    return next((form for form in _other_forms if form.matches(path)), None)


def error_content(scope: Scope, error: DubitoError) -> tuple[int, bytes, str]:
    """Return the status, body and media type of an error response."""
    form, detail = other_form(scope["path"]), to_utf8(str(error))
    if form is not None:
        status = 400 if error.status == 422 else error.status
        return status, orjson.dumps(form.content(status, detail)), JSON
    invalid_fields = [error, *error.other_errors] if isinstance(error, InvalidInput) else []
    content = {
        "type": f"{get_link_prefix(scope)}{PROBLEMS}#{error.code}",
        "title": HTTPStatus(error.status).phrase,
        "status": error.status,
        "detail": detail,
        "code": error.code,
        "field": None if error.field is None else to_utf8(error.field),
        "errors": [{"field": to_utf8(e.field), "detail": to_utf8(str(e))} for e in invalid_fields],
    }
    return error.status, orjson.dumps(content), PROBLEM_JSON


def error_response(scope: Scope, error: DubitoError) -> Response:
    """Build the response to an error and record its code."""
    # The frames reference the body, in cycles that delay its release.
    clear_frames(error.__traceback__)
    record = get_record(scope)
    record.reason = record.reason or error.code
    status, body, media_type = error_content(scope, error)
    headers = dict(error.headers) if isinstance(error, RequestError) else None
    return Response(body, status, headers, media_type=media_type)


def install(app: FastAPI) -> None:
    app.add_exception_handler(DubitoError, _answer_error)
    app.add_exception_handler(RequestValidationError, _answer_invalid_parameters)
    app.add_exception_handler(HTTPException, _answer_routing_error)


async def _answer_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, DubitoError)
    return error_response(request.scope, error)


async def _answer_invalid_parameters(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return error_response(request.scope, merge_errors([_invalid(each) for each in error.errors()]))


def _invalid(error: Mapping[str, Any]) -> InvalidInput:
    place, *names = map(str, error["loc"])
    name = ".".join(names)[:80]
    if error["type"] == "extra_forbidden":
        return InvalidInput(f"{place}: {name}", "none", "an unknown parameter")
    return InvalidInput(name, expected_value(error["msg"]), describe_value(error["input"]))


async def _answer_routing_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if not request.scope[SCOPES_KEY]:
        return error_response(request.scope, Unauthorized(REALM))
    if error.status_code == 405:
        return error_response(request.scope, MethodNotAllowed(_methods(request), request.method))
    form = other_form(request.scope["path"])
    page = "GET /docs" if form is None else form.guide
    missing = NotFound("path", f"a path listed by {page}", "an unknown path")
    return error_response(request.scope, missing)


def _methods(request: Request) -> str:
    routes: list[Route] = request.app.state.routes
    matching = [route for route in routes if route.matches(request.scope)[0] != Match.NONE]
    methods = {method for route in matching for method in route.methods or ()}
    return ", ".join(sorted(methods | ({"HEAD"} if "GET" in methods else set()))) or "another"


def all_problems() -> list[tuple[str, int, str, str]]:
    """List each error class's code, status, meaning and remedy, sorted by status."""
    kinds = [kind for kind in _subclasses(DubitoError) if "code" in vars(kind)]
    rows = {(kind.code, kind.status, _meaning(kind), kind.remedy) for kind in kinds}
    return sorted(rows, key=lambda row: (row[1], row[0]))


def _meaning(kind: type[DubitoError]) -> str:
    paragraph = str(getdoc(kind)).partition("\n\n")[0]
    return " ".join(paragraph.split()).removesuffix(".")


def _subclasses(kind: type[DubitoError]) -> Iterator[type[DubitoError]]:
    yield kind
    for subclass in kind.__subclasses__():
        yield from _subclasses(subclass)


@router.get(PROBLEMS)
async def get_problems() -> Response:
    rows = "".join(
        f'<dt id="{code}"><code>{code}</code> ({status})</dt>'
        f"<dd>{escape(meaning.replace('`', ''))}. Remedy: {escape(remedy.replace('`', ''))}.</dd>"
        for code, status, meaning, remedy in all_problems()
    )
    page = f'<!DOCTYPE html><html lang="en"><title>Problems</title><dl>{rows}</dl></html>'
    headers = {"Content-Security-Policy": "default-src 'none'"}
    return Response(page, media_type="text/html; charset=utf-8", headers=headers)
