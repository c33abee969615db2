"""The forms of errors: each path's protocol has its own.

Our own routes answer with problems (RFC 9457). Clients of the Open Inference Protocol read
`{"error": ...}`, those of MLflow `{"error_code": ..., "message": ...}`; both know 400 and no 422.
"""

import re
from collections.abc import Sequence
from http import HTTPStatus

import orjson
from starlette.responses import Response
from starlette.types import Scope

from model_store.errors import InvalidInput
from service.call import prefix_of

NAMED = re.compile(r"(.{0,200}?): expected ", re.DOTALL)  # the field of a detail
PROBLEMS = "/problems"
PROBLEM_JSON = "application/problem+json"
JSON = "application/json"
OPEN_INFERENCE = "/v2"
MLFLOW_PATHS = frozenset({"/invocations", "/ping", "/version"})
MLFLOW_CODES = {
    400: "BAD_REQUEST",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "RESOURCE_DOES_NOT_EXIST",
    405: "BAD_REQUEST",
    413: "BAD_REQUEST",
    415: "BAD_REQUEST",
    429: "REQUEST_LIMIT_EXCEEDED",
    503: "TEMPORARILY_UNAVAILABLE",
}


def is_of_others(path: str) -> bool:
    """Whether a path belongs to another protocol than ours."""
    return path == OPEN_INFERENCE or path.startswith(f"{OPEN_INFERENCE}/") or path in MLFLOW_PATHS


def error_form(
    scope: Scope, status: int, code: str, detail: str, errors: Sequence[InvalidInput] = ()
) -> tuple[int, bytes, str]:
    path = scope["path"]
    detail = _utf8(detail)
    if not is_of_others(path):
        named = NAMED.match(detail)
        content = {
            "type": f"{prefix_of(scope)}{PROBLEMS}#{code}",
            "title": HTTPStatus(status).phrase,
            "status": status,
            "detail": detail,
            "code": code,
            "field": None if named is None else named[1],
            "errors": [{"field": _utf8(e.field), "detail": _utf8(str(e))} for e in errors],
        }
        return status, orjson.dumps(content), PROBLEM_JSON
    status = 400 if status == 422 else status
    if path in MLFLOW_PATHS:
        code = MLFLOW_CODES.get(status, "BAD_REQUEST" if status < 500 else "INTERNAL_ERROR")
        return status, orjson.dumps({"error_code": code, "message": detail}), JSON
    return status, orjson.dumps({"error": detail}), JSON


def _utf8(text: str) -> str:
    """Replace lone surrogates, which can reach us by a path or query."""
    return text.encode("utf-8", "replace").decode("utf-8")


def problem(
    scope: Scope,
    status: int,
    code: str,
    detail: str,
    headers: dict[str, str] | None = None,
    errors: Sequence[InvalidInput] = (),
) -> Response:
    status, body, media_type = error_form(scope, status, code, detail, errors)
    return Response(body, status, headers, media_type=media_type)
