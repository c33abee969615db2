import subprocess
import sys
import threading
from collections.abc import Iterator
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from model_store.errors import InvalidInput
from service.settings import read_settings
from tests.support.environment import ROOT, environment_with
from tests.support.refusals import assert_invalid
from tests.support.serving import wait_until

ROW = [0.0] * 64
CANARY = "canary-3f9a"
TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector:
    """The spans that an HTTP server receives."""

    def __init__(self) -> None:
        self.spans, self.paths = [], set()

    def receive(self, path: str, body: bytes) -> None:
        self.paths.add(path)
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.spans += [span for scope in resource.scope_spans for span in scope.spans]

    def get_spans(self, name: str) -> list[object]:
        return [span for span in self.spans if span.name == name]


@pytest.fixture
def collector() -> Iterator[Collector]:
    received = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.receive(self.path, self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        received.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield received
        server.shutdown()
        thread.join()


@pytest.fixture
def trace(serve, digits_store, collector):
    """Return a function that traces the requests of another function."""

    def run(send, **settings):
        with serve(digits_store, DUBITO_OTLP_ENDPOINT=f"{collector.url}/", **settings) as (
            url,
            process,
        ):
            with httpx.Client(base_url=url, timeout=60) as client:
                send(client)
            process.terminate()
            assert "Traceback" not in process.communicate(timeout=60)[1]
        return collector

    return run


def attributes(span):
    return {
        pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in span.attributes
    }


def test_request_span_joins_the_callers_trace_without_client_data(trace):
    def send(client):
        client.headers["X-API-Key"] = key
        headers = {"traceparent": f"00-{TRACE}-{CALLER}-01", "X-Request-ID": "an-id"}
        client.post("/predict", json={"inputs": [ROW] * 2, "num_samples": 50}, headers=headers)
        client.post("/predict", json={"inputs": [[1]]})
        for value in (CANARY, f"00-{'0' * 32}-{CALLER}-01", f"ff-{TRACE}-{CALLER}-01", "é", ""):
            assert client.get("/models", headers={"traceparent": value.encode()}).status_code == 200
        odd_headers = {"User-Agent": CANARY, "tracestate": "no=thing", "baggage": f"a={CANARY}"}
        client.get(f"/models/{CANARY}?{CANARY}={CANARY}", headers=odd_headers)

    key = f"the-key-of-{CANARY}"
    collector = trace(send, DUBITO_API_KEYS=key)
    assert collector.paths == {"/v1/traces"}
    assert not any(CANARY in str(span) for span in collector.spans)
    predict_span, refused_span = collector.get_spans("POST /predict")
    assert (predict_span.trace_id.hex(), predict_span.parent_span_id.hex()) == (TRACE, CALLER)
    expected = {
        "http.request.method": "POST",
        "http.route": "/predict",
        "http.response.status_code": 200,
        "dubito.model": "digits",
        "dubito.version": "1",
        "dubito.rows": 2,
        "dubito.draws": 50,
        "dubito.request_id": "an-id",
        "dubito.key": f"api-{sha256(key.encode()).hexdigest()[:12]}",
    }
    assert expected.items() <= attributes(predict_span).items()
    assert "error.type" not in attributes(predict_span)
    assert 0 <= attributes(predict_span)["dubito.queue_seconds"] < 60
    assert 0 < attributes(predict_span)["dubito.compute_seconds"] < 60
    assert refused_span.trace_id.hex() != TRACE
    assert attributes(refused_span)["error.type"] == "invalid_input"
    assert attributes(refused_span)["http.response.status_code"] == 422
    root_spans = collector.get_spans("GET /models")
    assert len(root_spans) == 5
    assert not any(span.parent_span_id for span in (refused_span, *root_spans))
    assert collector.get_spans("GET /models/{name}")


def test_callers_sampling_decision_wins_and_fastapi_telemetry_is_off(trace, collector):
    def send(client):
        client.get("/models")
        client.get("/nothing", headers={"traceparent": f"00-{TRACE}-{CALLER}-01"})
        client.get("/metrics", headers={"traceparent": f"00-{TRACE}-{CALLER}-00"})

    sampler = {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0"}
    fastapi = {"FASTAPI_OTEL_AUTO_CONFIGURE": "true", "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url}
    assert [span.name for span in trace(send, **sampler, **fastapi).spans] == ["GET other"]


@pytest.mark.slow
def test_service_answers_and_stops_without_a_collector(serve, digits_store):
    with serve(digits_store, DUBITO_OTLP_ENDPOINT="http://127.0.0.1:9") as (url, process):
        assert httpx.post(f"{url}/predict", json={"inputs": [ROW]}, timeout=60).status_code == 200
        process.terminate()
        wait_until(lambda: process.poll() is not None)
        assert process.returncode == 0


def run(code, **settings):
    return subprocess.run(
        [sys.executable, "-c", code],
        env=environment_with(**settings),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_opentelemetry_is_imported_only_if_spans_are_exported():
    code = "import sys, service.__main__; from service.app import create_app; from service.settings import Settings"
    code += "; create_app(Settings()); print({'opentelemetry.sdk', 'requests'} & {*sys.modules})"
    assert run(code).stdout == "set()\n"


def test_missing_opentelemetry_is_reported_in_one_line():
    missing = "opentelemetry.exporter.otlp.proto.http"
    code = f"import sys; sys.modules['{missing}'] = None; from service.__main__ import main; sys.exit(main())"
    completed = run(code, DUBITO_OTLP_ENDPOINT="http://127.0.0.1:9")
    assert completed.returncode == 2
    assert completed.stderr.startswith("error: DUBITO_OTLP_ENDPOINT: expected the extra `otel`")
    assert len(completed.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "url", ["", "collector:4318", "ftp://collector", "http://", "http://[", "http://a:b"]
)
def test_endpoint_that_is_not_a_url_is_rejected(monkeypatch, url):
    monkeypatch.setenv("DUBITO_OTLP_ENDPOINT", url)
    assert_invalid(read_settings, "DUBITO_OTLP_ENDPOINT: expected ")


@pytest.mark.parametrize(
    "url", ["http://user:hunter2@collector:4318", "ftp://user:hunter2@collector"]
)
def test_endpoint_with_a_password_is_rejected_without_revealing_it(monkeypatch, url):
    monkeypatch.setenv("DUBITO_OTLP_ENDPOINT", url)
    with pytest.raises(InvalidInput) as raised:
        read_settings()
    assert str(raised.value).startswith("DUBITO_OTLP_ENDPOINT: expected ")
    assert "hunter2" not in str(raised.value)
