"""The log on standard error: text, or a JSON object a line with a line for each request.

Nothing that a client sent is logged but the id of its request, and that only where it is plain; of
a key its name.
"""

import logging
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import orjson

from service.call import RequestRecord
from service.settings import Settings

TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"

# loggers that write what clients sent
REPEAT_CLIENTS = ("python_multipart.multipart", "python_multipart.decoders")

RequestLog = Callable[[RequestRecord, str, int | None, float], None]


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        content: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _printable(record.getMessage()),
        }
        if record.exc_info:
            content["exception"] = _printable(self.formatException(record.exc_info))
        return orjson.dumps(content).decode()


def configure(settings: Settings) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if settings.log == "json" else logging.Formatter(TEXT))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    logging.captureWarnings(True)
    for name in REPEAT_CLIENTS:
        logging.getLogger(name).disabled = True


def request_log(settings: Settings) -> RequestLog | None:
    """Return what writes a request's line in the JSON log; None without such lines.

    It takes the record, route, status (None where the client disconnected) and seconds. It bypasses
    `logging`, which takes four times as long.
    """
    if settings.log != "json":
        return None
    descriptor = sys.stderr.fileno()

    def write(record: RequestRecord, route: str, status: int | None, seconds: float) -> None:
        content = {
            "time": datetime.now(UTC),
            "level": "info",
            "logger": "dubito.requests",
            "message": "request",
            "request_id": record.request_id,
            "route": route,
            "method": record.method,
            "status": status,
            "key": record.key,
            "seconds": round(seconds, 6),
            "queue_seconds": round(record.queue_s, 6),
            "compute_seconds": round(record.compute_s, 6),
            "model": record.model,
            "version": record.version,
            "rows": record.rows,
            "draws": record.draws,
            "flags": record.flags,
            "reason": record.reason,
        }
        if record.trace_id is not None:
            content["trace_id"] = record.trace_id
        with suppress(OSError):  # no reader, or a full disk: no reason to fail a request
            os.write(descriptor, orjson.dumps(content, option=orjson.OPT_APPEND_NEWLINE))

    return write


def where(error: BaseException) -> str:
    """Return the type of an unexpected error and its place; its text may repeat the request."""
    frames = "".join(traceback.format_tb(error.__traceback__)).rstrip()
    return f"{type(error).__name__}\n{frames}"


def _printable(text: str) -> str:
    return text.encode("utf-8", "replace").decode("utf-8")
