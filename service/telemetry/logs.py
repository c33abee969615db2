"""Logging to standard error, as text or JSON lines.

A thread writes the log, so that a slow reader does not delay requests or the end of the process. If
too many records wait, further ones are dropped and counted. Except for request ids, the log
contains no text from clients.
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

import orjson
from prometheus_client import Counter

from service.request_context import RequestRecord
from service.settings import Settings

TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
MAX_WAITING = 10_000  # records
END_S = 1.0  # for the last records
STDERR = 2
REQUESTS = logging.getLogger("dubito.requests")
DROPPED = Counter("dubito_log_dropped", "Log records dropped", registry=None)

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

    def handleError(self, _: logging.LogRecord) -> None:
        """Drop a record if the queue is full."""
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
    formatter = JsonFormatter() if settings.log == "json" else logging.Formatter(TEXT)
    records = Queue[Any](MAX_WAITING)
    writer = _Writer(records, formatter)
    writer.start()
    atexit.register(writer.close)
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
