"""Request spans for an OpenTelemetry collector (extra `otel`).

Spans continue the caller's trace (W3C Trace Context), and are sent by a separate thread. Like the
log, they contain no text from clients.
"""

import threading
from typing import TYPE_CHECKING

from starlette.types import Scope

from model_store.errors import InvalidInput
from service.request_context import RequestRecord
from service.settings import PREFIX, Settings

if TYPE_CHECKING:
    from opentelemetry.trace import Span

VARIABLE = f"{PREFIX}OTLP_ENDPOINT"
TIMEOUT_S = 5  # to send a batch of spans
CLOSE_S = 3  # to send the last spans


def check_tracing(settings: Settings) -> None:
    """Raise InvalidInput if tracing is configured but the extra `otel` is not installed."""
    if settings.otlp_endpoint is None:
        return
    try:
        import opentelemetry.exporter.otlp.proto.http
        import opentelemetry.sdk.trace  # noqa: F401
    except ImportError:
        expected = "the extra `otel` to be installed"
        raise InvalidInput(VARIABLE, expected, "missing packages") from None


class Tracing:
    def __init__(self, endpoint: str) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace import SpanKind, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        exporter = OTLPSpanExporter(f"{endpoint.rstrip('/')}/v1/traces", timeout=TIMEOUT_S)
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": "dubito"}), shutdown_on_exit=False
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("dubito")
        self._context = TraceContextTextMapPropagator()
        self._kind, self._error = SpanKind.SERVER, StatusCode.ERROR

    def begin(self, scope: Scope, record: RequestRecord) -> "Span":
        headers = [(n, v) for n, v in scope["headers"] if n in (b"traceparent", b"tracestate")]
        carrier = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers}
        parent = self._context.extract(carrier)
        span = self._tracer.start_span("request", parent, self._kind)
        record.trace_id = f"{span.get_span_context().trace_id:032x}"
        return span

    def end(self, span: "Span", record: RequestRecord, route: str, status: int | None) -> None:
        attributes = {
            "http.request.method": record.method,
            "http.route": route,
            "http.response.status_code": status,
            "error.type": record.reason,
            "dubito.request_id": record.request_id,
            "dubito.queue_seconds": record.queue_s,
            "dubito.compute_seconds": record.compute_s,
            **{f"dubito.{name}": value for name, value in record.usage.items()},
        }
        span.update_name(f"{record.method} {route}")
        span.set_attributes({k: v for k, v in attributes.items() if v is not None})
        if status is None or status >= 500:
            span.set_status(self._error)
        span.end()

    def close(self) -> None:
        """Send the last spans within `CLOSE_S` seconds."""
        closing = threading.Thread(target=self._provider.shutdown, name="last-spans", daemon=True)
        closing.start()
        closing.join(CLOSE_S)
