"""Middleware for HEAD, ETag, Accept and Accept-Encoding."""

from hashlib import sha256

from fastapi import Response
from starlette.datastructures import MutableHeaders
from starlette.middleware.gzip import (
    DEFAULT_EXCLUDED_CONTENT_TYPES,
    GZipResponder,
    IdentityResponder,
)
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.api.media_types import JSON, accepts_gzip, list_header, weight
from service.api.problems import error_response, other_form
from service.api.requests import NPZ, PARQUET
from service.errors import NotAcceptable

READ_METHODS = {"GET", "HEAD"}
GZIP_LEVEL = 1  # reduces JSON to a quarter, at 100 MB/s
MIN_GZIP_BYTES = 500
COMPRESSED_TYPES = (*DEFAULT_EXCLUDED_CONTENT_TYPES, NPZ, PARQUET)


class HttpForms:
    """Handle HEAD, conditional GET and Accept for all routes that `Shortcut` does not serve."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if scope["method"] in READ_METHODS:
            answer = _Answer(scope, receive, send)
            scope["method"] = "GET"  # the method of routes
            try:
                await self.app(scope, receive, answer.send)
            finally:
                scope["method"] = answer.method
        else:
            await (_check_accept(scope, JSON) or self.app)(scope, receive, send)


class Compression:
    """Compress answers with gzip if the client accepts it."""

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


class _Answer:
    """Sender of the response to a GET or HEAD request."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope, self.method = scope, scope["method"]
        self._receive, self._send = receive, send
        self._start: Message | None = None  # delayed, because the ETag depends on the body
        self._is_over = False  # drops further messages

    async def send(self, message: Message) -> None:
        if self._is_over:
            return
        if message["type"] == "http.response.start":
            self.scope["method"] = self.method
            self._start = message
            return
        start, self._start = self._start, None
        if start is not None:
            message = await self._begin(start, message)
        if not self._is_over:
            await self._send(message)

    async def _begin(self, start: Message, body: Message) -> Message:
        headers = MutableHeaders(raw=start["headers"])
        if start["status"] == 200:
            media_type = headers.get("content-type", "").partition(";")[0]
            refusal = _check_accept(self.scope, media_type)
            if refusal is not None:
                self._is_over = True
                await refusal(self.scope, self._receive, self._send)
                return body
            if not body.get("more_body"):
                headers.setdefault("etag", f'W/"{sha256(body["body"]).hexdigest()[:32]}"')
                headers.setdefault("cache-control", "private, no-cache")
            if _matches_etag(headers.get("etag"), list_header(self.scope, b"if-none-match")):
                start["status"] = 304
                del headers["content-length"]
        await self._send(start)
        if start["status"] == 304 or self.method == "HEAD":
            self._is_over = True
            await self._send({"type": "http.response.body", "body": b""})
        return body


def _matches_etag(etag: str | None, if_none_match: str) -> bool:
    return etag is not None and (if_none_match == "*" or etag.removeprefix("W/") in if_none_match)


def _check_accept(scope: Scope, media_type: str) -> Response | None:
    """Return 406 if the client rejects the media type. Routes of other protocols are exempt."""
    is_accepted = weight(list_header(scope, b"accept"), media_type) > 0
    if is_accepted or other_form(scope["path"]) is not None:
        return None
    return error_response(scope, NotAcceptable(media_type))
