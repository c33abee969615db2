"""The guard at the door: requests without a key for their path are refused, and the OpenAPI
document says so."""

from base64 import b64decode
from contextlib import suppress
from typing import Any

from fastapi import FastAPI, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from service.api.problems import problem
from service.auth.key_file import KeyRing
from service.auth.keys import LABEL_STUDIO_PREFIX, Keys, key_name
from service.server.shares import KEY_NAME
from service.telemetry.records import record_of

EXPECTED = "key: expected one that is valid here, as Authorization: Bearer KEY or X-API-Key: KEY"
REALM = 'Bearer realm="dubito"'


class RequireKey:
    """Middleware that answers 401 to requests without a valid key where one is needed, and 403
    where its scopes do not reach; below all that counts and logs them.
    """

    def __init__(self, app: ASGIApp, ring: KeyRing) -> None:
        self.app = app
        self.ring = ring

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on with the name of its key, or refuse it before a byte of its body is
        read."""
        if scope["type"] == "http":
            refusal = _refusal(scope, self.ring.keys)
            if refusal is not None:
                await refusal(scope, receive, send)
                return
        await self.app(scope, receive, send)


def _refusal(scope: Scope, keys: Keys) -> Response | None:
    """Note which key a request came with, and return why it is refused, if it is.

    One answer for keys that are unknown and that have expired: only the log tells them apart.
    """
    record = record_of(scope)
    given = _given(scope)
    key = keys.find(given) if given else None
    if key is not None:
        record.key = key.name
    valid = None if key is None or key.has_expired else key
    if valid is not None:
        scope[KEY_NAME] = valid.name
    needed = keys.needed(scope["path"])
    if needed is None:
        return None
    if valid is None:
        record.reason = "unauthorized" if key is None else "expired_key"
        detail = f"{EXPECTED}, got none, an unknown one or one that has expired"
        return problem(scope["path"], 401, detail, {"WWW-Authenticate": REALM})
    if needed not in valid.scopes:
        record.reason = "forbidden"
        headers = {"WWW-Authenticate": f'{REALM}, error="insufficient_scope", scope="{needed}"'}
        detail = f"key: expected one with the scope {needed}, got one without"
        return problem(scope["path"], 403, detail, headers)
    return None


def may_see_names(scope: Scope, keys: Keys) -> bool:
    """Whether who asks an open path may be told names of models: all may, or where there are keys
    those with one."""
    return keys.api_is_open or key_name(scope) is not None


def _given(scope: Scope) -> bytes:
    """Return the key that a request gives: X-API-Key, else a bearer's token; empty where there is
    none.

    Label Studio has no other way to give one to a backend than as the password of basic
    authentication.
    """
    is_of_label_studio = scope["path"].startswith(LABEL_STUDIO_PREFIX)
    bearer = b""
    for name, value in scope["headers"]:
        if name == b"x-api-key":
            return bytes(value)
        if name == b"authorization" and value[:7].lower() == b"bearer ":
            bearer = value[7:].strip()
        if name == b"authorization" and value[:6].lower() == b"basic " and is_of_label_studio:
            with suppress(ValueError):
                bearer = b64decode(value[6:].strip(), validate=True).partition(b":")[2]
    return bearer


def install(app: FastAPI, ring: KeyRing) -> None:
    """Have requests show a key, and the OpenAPI document say so; does nothing where there are no
    keys."""
    if not ring.keys.names:
        return
    app.add_middleware(RequireKey, ring=ring)
    undeclared = app.openapi

    def openapi() -> dict[str, Any]:
        document = undeclared()
        document.setdefault("components", {})["securitySchemes"] = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "key": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
        }
        for path, operations in document["paths"].items():
            needed = ring.keys.needed(path)
            if needed is not None:
                for operation in operations.values():
                    operation["security"] = [{"bearer": [needed]}, {"key": [needed]}]
                    operation["responses"]["401"] = _refused("No valid key")
                    operation["responses"]["403"] = _refused(
                        f"The key is without the scope {needed}"
                    )
        return document

    app.openapi = openapi  # type: ignore[method-assign]


def _refused(description: str) -> dict[str, Any]:
    schema = {"$ref": "#/components/schemas/Problem"}
    return {"description": description, "content": {"application/problem+json": {"schema": schema}}}
