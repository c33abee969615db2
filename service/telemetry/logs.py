"""Logging to standard error, as text or JSON lines.

A thread writes the log, so that a slow reader does not delay requests or the shutdown. If too many
records wait, new records are dropped and counted, and the service refuses changes. Part of the
queue is reserved for audit records. The log contains no text from clients, except request ids,
paths of refused requests, and row ids of failed jobs.
"""

import atexit
import logging
import os
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from logging.handlers import QueueHandler, QueueListener
from queue import Full, Queue
from typing import Any
from urllib.parse import quote

import orjson
from prometheus_client import Counter
from starlette.types import Scope

from service.errors import NotReady, to_utf8
from service.request_context import RequestRecord, get_record
from service.settings import Settings

TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
MAX_WAITING = 10_000  # records
AUDIT_RESERVE = 1000  # additional audit records
MAX_PATH_CHARACTERS = 200
END_S = 1.0  # for the last records
STDERR = 2
REQUESTS = logging.getLogger("dubito.requests")
AUDIT = logging.getLogger("dubito.audit")
AUDIT.setLevel(logging.INFO)  # independent of the root logger's level
DROPPED = Counter("dubito_log_dropped", "Log records dropped", registry=None)

# These loggers would write content from clients.
DISABLED_LOGGERS = ("python_multipart.multipart", "python_multipart.decoders")

RequestLog = Callable[[RequestRecord, str, int | None, float], None]
_waiting = Queue[Any](MAX_WAITING + AUDIT_RESERVE)


class TextFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = getattr(record, "fields", {})
        texts = [f"{name}={orjson.dumps(value).decode()}" for name, value in fields.items()]
        return " ".join([super().format(record), *texts])


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        content: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": to_utf8(record.getMessage()),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            content["exception"] = to_utf8(self.formatException(record.exc_info))
        return orjson.dumps(content).decode()


class _Queue(QueueHandler):
    queue: Queue[Any]
    dropped = 0  # since the last report

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        """Return the record unformatted, because the writing thread formats it."""
        return record

    def enqueue(self, record: logging.LogRecord) -> None:
        is_change = record.name == AUDIT.name and record.levelno == logging.INFO
        if not is_change and self.queue.qsize() >= MAX_WAITING:
            raise Full
        if self.dropped and self.queue.qsize() < MAX_WAITING // 2:
            message = f"{self.dropped} log records were dropped"
            level = {"levelno": logging.ERROR, "levelname": "ERROR"}
            super().enqueue(logging.makeLogRecord({"name": "dubito", "msg": message, **level}))
            self.dropped = 0
        super().enqueue(record)

    def handleError(self, _: logging.LogRecord) -> None:
        """Count a record that was dropped because the queue is full."""
        self.dropped += 1
        DROPPED.inc()


class _Writer(QueueListener):
    """A thread that writes records without locks, so that it can block until the process ends."""

    def __init__(self, records: Queue[Any], formatter: logging.Formatter) -> None:
        super().__init__(records)
        self.formatter = formatter

    def handle(self, record: logging.LogRecord) -> None:
        try:
            line = f"{self.formatter.format(record)}\n".encode("utf-8", "replace")
            while line:
                line = line[os.write(STDERR, line) :]
        except Exception:  # such as a closed pipe; the thread must go on
            DROPPED.inc()

    def close(self) -> None:
        with suppress(Full):
            self.enqueue_sentinel()
        if self._thread is not None:
            self._thread.join(END_S)


def configure(settings: Settings) -> None:
    formatter = JsonFormatter() if settings.log == "json" else TextFormatter(TEXT)
    writer = _Writer(_waiting, formatter)
    writer.start()
    atexit.register(writer.close)
    logging.basicConfig(level=logging.INFO, handlers=[_Queue(_waiting)], force=True)
    logging.captureWarnings(True)
    for name in DISABLED_LOGGERS:
        logging.getLogger(name).disabled = True


def log_request(record: RequestRecord, route: str, status: int | None, seconds: float) -> None:
    fields = {
        "request_id": record.request_id,
        "route": route,
        "method": record.method,
        "status": status,
        "seconds": round(seconds, 6),
        "queue_seconds": round(record.queue_s, 6),
        "compute_seconds": round(record.compute_s, 6),
        **record.usage,
        "reason": record.reason,
    }
    if record.trace_id is not None:
        fields["trace_id"] = record.trace_id
    REQUESTS.info("request", extra={"fields": fields})


class AuditLog:
    """Logs the changes that a request makes, with its key and address."""

    def __init__(self, scope: Scope) -> None:
        if _waiting.qsize() >= MAX_WAITING:
            raise NotReady("the log is not being read, and changes must be logged")
        self._scope = scope

    def __call__(
        self,
        action: str,
        model: str,
        version: str | None,
        before: Any,
        after: Any,
        job: str | None = None,
    ) -> None:
        change = {"model": model, "version": version, "before": before, "after": after}
        AUDIT.info(action, extra={"fields": _origin(self._scope) | change | {"job": job}})


def log_refusal(scope: Scope) -> None:
    """Log a request that lacks sufficient authentication."""
    path = quote(scope["path"], errors="replace")[:MAX_PATH_CHARACTERS]
    fields = _origin(scope) | {"path": path, "reason": get_record(scope).reason}
    AUDIT.warning("refuse", extra={"fields": fields})


def _origin(scope: Scope) -> dict[str, str | None]:
    record, peer = get_record(scope), scope.get("client")
    address = peer[0] if peer else None
    return {"request_id": record.request_id, "key": record.key, "address": address}


def format_traceback(error: BaseException) -> str:
    """Return an error's type and traceback, without its message, which may repeat input."""
    frames = "".join(traceback.format_tb(error.__traceback__)).rstrip()
    return f"{type(error).__name__}\n{frames}"
