"""Logging to standard error, as text or JSON lines.

A thread writes the log, so that a slow reader does not delay requests. Except for request ids, the
log contains no text from clients.
"""

import atexit
import logging
import sys
import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from logging.handlers import QueueHandler, QueueListener
from queue import Queue
from typing import Any

import orjson

from service.request_context import RequestRecord
from service.settings import Settings

TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
MAX_WAITING = 10_000  # records
REQUESTS = logging.getLogger("dubito.requests")

# These loggers would write content from clients.
DISABLED_LOGGERS = ("python_multipart.multipart", "python_multipart.decoders")

RequestLog = Callable[[RequestRecord, str, int | None, float], None]


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        content: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _printable(record.getMessage()),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            content["exception"] = _printable(self.formatException(record.exc_info))
        return orjson.dumps(content).decode()


class _Queue(QueueHandler):
    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        """Leave the formatting to the writing thread."""
        return record

    def handleError(self, record: logging.LogRecord) -> None:
        """Drop a record if the queue is full."""


def configure(settings: Settings) -> None:
    writer = logging.StreamHandler(sys.stderr)
    writer.setFormatter(JsonFormatter() if settings.log == "json" else logging.Formatter(TEXT))
    records = Queue[Any](MAX_WAITING)
    listener = QueueListener(records, writer)
    listener.start()
    atexit.register(listener.stop)  # writes the last records
    logging.basicConfig(level=logging.INFO, handlers=[_Queue(records)], force=True)
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


def where(error: BaseException) -> str:
    """Return the type and traceback of an error, without its message, which may repeat input."""
    frames = "".join(traceback.format_tb(error.__traceback__)).rstrip()
    return f"{type(error).__name__}\n{frames}"


def _printable(text: str) -> str:
    return text.encode("utf-8", "replace").decode("utf-8")
