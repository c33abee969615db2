"""Middleware for frequent routes, HEAD and compression."""

from collections.abc import Sequence

from fastapi.routing import APIRoute
from starlette.middleware.gzip import (
    DEFAULT_EXCLUDED_CONTENT_TYPES,
    GZipResponder,
    IdentityResponder,
)
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from model_store.errors import DubitoError
from service.api.media_types import accepts_gzip
from service.api.problems import error_response
from service.api.requests import NPZ, PARQUET
from service.api.responses import PartsResponse
from service.auth.scopes import SCOPES_KEY, authorize, needed_scope
from service.auth.scopes import Scope as KeyScope

GZIP_LEVEL = 1  # reduces JSON to a quarter, at 100 MB/s
MIN_GZIP_BYTES = 500
MIN_FREQUENT_GZIP_BYTES = 64 << 10  # of answers by `Shortcut`
COMPRESSED_TYPES = (*DEFAULT_EXCLUDED_CONTENT_TYPES, NPZ, PARQUET)


class Shortcut:
    """Middleware that calls the endpoints of frequent POST routes directly.

    FastAPI's layers take longer than parsing a row. The endpoints take only the request and path
    parameters, and this class checks the scope of the API key.
    """

    def __init__(self, app: ASGIApp, routes: Sequence[APIRoute]) -> None:
        self.app = app
        self.routes = [(route, needed_scope(route)) for route in routes]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_post = scope["type"] == "http" and scope["method"] == "POST"
        match = self._find(scope["path"]) if is_post else None
        if match is None:
            await self.app(scope, receive, send)
            return
        route, needed, parameters = match
        scope["route"] = route
        request = Request(scope, receive, send)
        answer: ASGIApp
        try:
            if needed is not None and needed not in scope[SCOPES_KEY]:
                authorize(scope, needed)  # raises the error
            response = await route.endpoint(request, **parameters)
        except DubitoError as error:
            response = error_response(scope, error)
        size = len(response.body)
        is_large = isinstance(response, PartsResponse) or size >= MIN_FREQUENT_GZIP_BYTES
        answer = Compression(response) if is_large else response
        await answer(scope, receive, send)

    def _find(self, path: str) -> tuple[APIRoute, KeyScope | None, dict[str, str]] | None:
        for route, needed in self.routes:
            match = route.path_regex.fullmatch(path)
            if match is not None:
                return route, needed, match.groupdict()
        return None


class Compression:
    """Middleware that compresses answers with gzip if the client accepts it."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self.app
        if scope["type"] == "http" and accepts_gzip(scope):
            app = GZipResponder(
                app, MIN_GZIP_BYTES, GZIP_LEVEL, exclude_content_types=COMPRESSED_TYPES
            )
        elif scope["type"] == "http":
            app = IdentityResponder(app, MIN_GZIP_BYTES)  # sets Vary
        await app(scope, receive, send)


class HeadAsGet:
    """Middleware that routes HEAD requests like GET. The server omits the body of the answer."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_head = scope["type"] == "http" and scope["method"] == "HEAD"
        if is_head:
            scope["method"] = "GET"
        try:
            await self.app(scope, receive, send)
        finally:
            if is_head:
                scope["method"] = "HEAD"
