"""The outermost middleware: gives each request an id and a record; counts, logs and traces it."""

import logging
import time
from traceback import clear_frames

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.error_forms import problem
from service.telemetry.logs import RequestLog, where
from service.telemetry.metrics import Metrics
from service.telemetry.records import new_record
from service.telemetry.tracing import Tracing

logger = logging.getLogger("dubito")


class Observe:
    """Observes requests by route (paths are without bound); answers unexpected errors with 500."""

    def __init__(
        self, app: ASGIApp, metrics: Metrics, log: RequestLog | None, tracing: Tracing | None
    ) -> None:
        self.app = app
        self.metrics = metrics
        self.log = log
        self.tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        record = new_record(scope)
        span = None if self.tracing is None else self.tracing.begin(scope, record)
        status: int | None = None  # the client went away before an answer

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [
                    *message.get("headers", ()),
                    (b"x-request-id", record.request_id.encode()),
                ]
            await send(message)

        try:
            await self.app(scope, receive, send_with_id)
        except ClientDisconnect as gone:  # nobody is left to answer
            record.reason = "client_gone"
            clear_frames(gone.__traceback__)  # they hold the body
        except Exception as error:
            record.reason = "unexpected"
            logger.error("unexpected error in request %s: %s", record.request_id, where(error))
            # else it is too late for another answer, and the server ends the connection
            if status is None:
                detail = (
                    "an error that Dubito did not expect; the service's log has it under this "
                    "X-Request-ID"
                )
                await problem(scope["path"], 500, detail)(scope, receive, send_with_id)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            seconds = time.perf_counter() - record.begun
            self.metrics.count_request(route, status, record.reason, seconds)
            if self.log is not None:
                self.log(record, route, status, seconds)
            if span is not None and self.tracing is not None:
                self.tracing.end(span, record, route, status)
