"""The guard at the door: requests without a key for their path are refused, and the OpenAPI document says so."""

from hashlib import sha256
from typing import Any

from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

from service.http.problems import problem
from service.middleware.keys import Keys, is_one_of
from service.observability.records import record_of
from service.process.clients import KEY_NAME


class RequireKey:
    """Middleware that answers 401 to requests without a key for their path; below all that counts and logs them."""

    def __init__(self, app: ASGIApp, keys: Keys) -> None:
        self.app = app
        self.keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it before a byte of its body is read."""
        if scope["type"] == "http":
            needed = self.keys.needed(scope["path"])
            if needed and not is_one_of(_key(scope), needed):
                record_of(scope).reason = "unauthorized"
                detail = "key: expected one that is valid here, as Authorization: Bearer KEY or X-API-Key: KEY"
                refusal = problem(
                    401, f"{detail}, got none or another", {"WWW-Authenticate": 'Bearer realm="dubito"'}
                )
                await refusal(scope, receive, send)
                return
            if needed:
                scope[KEY_NAME] = sha256(_key(scope)).digest()
        await self.app(scope, receive, send)


def may_see_names(scope: Scope, keys: Keys) -> bool:
    """Whether who asks an open path may be told names of models: all may, or where there are keys those with one."""
    return not keys.api or is_one_of(_key(scope), keys.api + keys.admin)


def _key(scope: Scope) -> bytes:
    """Return the key that a request gives: X-API-Key, else a bearer's token; empty where there is none."""
    bearer = b""
    for name, value in scope["headers"]:
        if name == b"x-api-key":
            return bytes(value)
        if name == b"authorization" and value[:7].lower() == b"bearer ":
            bearer = value[7:].strip()
    return bearer


def install(app: FastAPI, keys: Keys) -> None:
    """Have requests show a key, and the OpenAPI document say so; does nothing where there are no keys."""
    if not keys.api and not keys.admin:
        return
    app.add_middleware(RequireKey, keys=keys)
    undeclared = app.openapi

    def openapi() -> dict[str, Any]:
        document = undeclared()
        document.setdefault("components", {})["securitySchemes"] = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "key": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
        }
        refused = {"description": "No valid key", "content": {"application/problem+json": {}}}
        for path, operations in document["paths"].items():
            if keys.needed(path):
                for operation in operations.values():
                    operation["security"] = [{"bearer": []}, {"key": []}]
                    operation["responses"]["401"] = refused
        return document

    app.openapi = openapi  # type: ignore[method-assign]
