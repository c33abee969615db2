"""Middleware for metrics, logs and traces."""

import asyncio
import logging
import re
import secrets
import time
from dataclasses import dataclass
from threading import Event
from traceback import clear_frames

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from model_store.errors import DubitoError
from service.api.problems import error_response
from service.errors import ShuttingDown
from service.request_context import PREFIX_KEY, RECORD_KEY, RequestRecord
from service.telemetry.logs import RequestLog, log_refusal, where
from service.telemetry.metrics import Metrics
from service.telemetry.tracing import Tracing

logger = logging.getLogger("dubito")

ID_BYTES = 16
METHODS = frozenset(
    {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT"}
)
REFUSALS = {401, 403, 421}  # from `service.auth`
VERSION_PREFIX = "/v1"  # of the API, before any path
_CLIENT_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")


@dataclass(frozen=True)
class Observe:
    """Middleware that records every request and answers unexpected errors with 500.

    During shutdown, connections are closed after the next answer.
    """

    app: ASGIApp
    metrics: Metrics
    log: RequestLog | None
    tracing: Tracing | None
    ending: Event
    prefix: str = ""  # of the proxy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        self._strip_prefixes(scope)
        record = scope[RECORD_KEY] = self._new_record(scope)
        span = None if self.tracing is None else self.tracing.begin(scope, record)
        status: int | None = None  # None if the client disconnects before the answer

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                closing = [(b"connection", b"close")] if self.ending.is_set() else []
                request_id = (b"x-request-id", record.request_id.encode())
                message["headers"] = [*message.get("headers", ()), *closing, request_id]
            await send(message)

        try:
            await self.app(scope, receive, send_with_id)
        except ClientDisconnect as disconnect:
            record.reason = "client_gone"
            clear_frames(disconnect.__traceback__)  # to free the memory of the body
        except asyncio.CancelledError:
            if self.ending.is_set():  # otherwise another ASGI server noticed a disconnect
                error = ShuttingDown()
                record.reason = error.code
                if status is None:
                    await error_response(scope, error)(scope, receive, send_with_id)
            raise
        except Exception as error:
            record.reason = "unexpected"
            logger.error("unexpected error in request %s: %s", record.request_id, where(error))
            # If the answer has started, the server closes the connection.
            if status is None:
                detail = "unexpected error; search the service's log for this X-Request-ID"
                await error_response(scope, DubitoError(detail))(scope, receive, send_with_id)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            seconds = time.perf_counter() - record.started
            self.metrics.count_request(route, status, record.reason, seconds)
            if status in REFUSALS:
                log_refusal(scope)
            if self.log is not None:
                self.log(record, route, status, seconds)
            if span is not None and self.tracing is not None:
                self.tracing.end(span, record, route, status)

    def _strip_prefixes(self, scope: Scope) -> None:
        prefix, path = self.prefix, scope["path"]
        if prefix and path.startswith(f"{prefix}/"):
            path = path.removeprefix(prefix)
        if path.startswith(f"{VERSION_PREFIX}/"):
            path, prefix = path.removeprefix(VERSION_PREFIX), prefix + VERSION_PREFIX
        scope["path"], scope[PREFIX_KEY] = path, prefix

    @staticmethod
    def _new_record(scope: Scope) -> RequestRecord:
        """Create a request's record, with its X-Request-ID if that is valid, or a new id."""
        started = time.perf_counter()
        ids = [value for name, value in scope["headers"] if name == b"x-request-id"]
        is_plain = len(ids) == 1 and _CLIENT_ID.fullmatch(ids[0])
        request_id = ids[0].decode() if is_plain else secrets.token_hex(ID_BYTES)
        method = scope["method"] if scope["method"] in METHODS else "other"
        return RequestRecord(request_id, method, started)
