import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from model_store.artifacts.store import ModelStore
from model_store.errors import BrokenArtifact
from model_store.inference.preflight import PreflightProcess
from service import limits
from service.models.preflights import Preflights
from service.settings import Settings
from tests.support.environment import ROOT
from tests.support.graphs import add_allocation, add_allocation_for_rows, make_endless
from tests.support.process import children, is_running, peak_bytes
from tests.support.serving import FAST_POLLING, predict_blank, wait_until
from tests.support.stores import publish_again

NUMBERS = 300_000_000  # 1.2 GB of float32
BYTES = 512 << 20
PREFLIGHT_SETTINGS = {
    **FAST_POLLING,
    "DUBITO_PREFLIGHT_TIMEOUT_S": "60",
    "DUBITO_DEFAULT_MODEL": "digits",
}
KEY = "a-key-of-the-interface"


@pytest.fixture
def graphs(digits_store):
    """Return both graphs of `digits`."""
    files = ModelStore(digits_store).open("digits", "1").files
    return {stem: files[f"{stem}.onnx"] for stem in ("sampler", "network")}


@pytest.fixture
def preflights(writable_store, monkeypatch):
    monkeypatch.setattr(limits, "PREFLIGHT_BYTES", BYTES)
    stop = threading.Event()
    runner = Preflights(Settings(store=writable_store.root, preflight_timeout_s=60), stop)
    yield runner, stop
    stop.set()
    runner.close()


@pytest.mark.slow
def test_endless_graph_blocks_neither_startup_nor_models_nor_shutdown(
    serve, writable_store, digits_store, graphs
):
    publish_again(
        writable_store, digits_store, "a-endless", sampler=make_endless(graphs["sampler"])
    )
    settings = {**PREFLIGHT_SETTINGS, "DUBITO_API_KEYS": KEY, "DUBITO_PREFLIGHT_TIMEOUT_S": "600"}
    with serve(writable_store.root, **settings) as (url, process):
        client = httpx.Client(base_url=url, headers={"X-API-Key": KEY}, timeout=30)
        with client:
            assert predict_blank(client).json()["version"] == "1"
            assert client.get("/health/ready").json()["models"] == {"digits": "1"}
            response = predict_blank(client, model="a-endless", deadline_s=0.5)
            assert (response.status_code, "deadline" in response.json()["detail"]) == (504, True), (
                response.text
            )
            publish_again(writable_store, digits_store)
            wait_until(lambda: predict_blank(client).json()["version"] == "2")
            assert client.get("/models/a-endless").json()["serving"] is None
            (preflight_pid,) = children(process.pid)
            assert KEY.encode() not in Path(f"/proc/{preflight_pid}/environ").read_bytes()
        start = time.monotonic()
        process.terminate()
        assert process.wait(20) in (0, -signal.SIGTERM)
        assert time.monotonic() - start < 5
        assert not is_running(preflight_pid)


def test_preflight_process_ends_with_killed_parent():
    code = (
        "import time; from model_store.inference.preflight import PreflightProcess as P; "
        "p = P(); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT) as process:
        wait_until(lambda: any(_is_in_python(pid) for pid in children(process.pid)))
        (preflight_pid,) = children(process.pid)
        os.kill(preflight_pid, signal.SIGSTOP)
        process.kill()
    wait_until(lambda: not is_running(preflight_pid))


def _is_in_python(pid):
    return Path(f"/proc/{pid}/oom_score_adj").read_text().strip() == "1000"


@pytest.mark.parametrize("part", ["sampler", "network"])
@pytest.mark.parametrize("when_loaded", [True, False])
def test_graph_that_exceeds_memory_limit_is_reported_as_broken(
    preflights, writable_store, digits_store, graphs, part, when_loaded
):
    runner, _ = preflights
    graph = add_allocation(graphs[part], NUMBERS, when_loaded)
    version = publish_again(writable_store, digits_store, "digits", **{part: graph})
    with pytest.raises(
        BrokenArtifact, match=rf"digits version {version}: .* more than 536870912 bytes of memory"
    ):
        runner.check(writable_store.manifest("digits", version))
    runner.check(writable_store.manifest("digits", "1"))


def test_failing_version_is_reported_and_previous_version_keeps_serving(
    serve, writable_store, digits_store, graphs
):
    limits = {"PREFLIGHT_BYTES": BYTES}
    with (
        serve(writable_store.root, limits=limits, **PREFLIGHT_SETTINGS) as (url, process),
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        publish_again(
            writable_store, digits_store, network=add_allocation(graphs["network"], NUMBERS, True)
        )
        wait_until(lambda: "2" in client.get("/models/digits").json()["broken"])
        assert "bytes of memory" in client.get("/models/digits").json()["broken"]["2"]
        assert predict_blank(client).json()["version"] == "1"
        response = predict_blank(client, version="2")
        assert (response.status_code, "bytes of memory" in response.json()["detail"]) == (
            503,
            True,
        )
        wait_until(lambda: not children(process.pid))


def test_graph_that_exceeds_memory_at_one_row_count_fails_only_there(
    serve, writable_store, digits_store, graphs
):
    publish_again(
        writable_store, digits_store, network=add_allocation_for_rows(graphs["network"], 3, NUMBERS)
    )
    limits = {"PREFLIGHT_BYTES": BYTES}
    with (
        serve(writable_store.root, limits=limits, **PREFLIGHT_SETTINGS) as (url, process),
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        for rows in (1, 3, 2, 3, 4):
            response = client.post("/predict", json={"inputs": [[0] * 64] * rows, "num_samples": 2})
            if rows != 3:
                assert response.json()["version"] == "2"
                continue
            assert (response.status_code, response.json()["code"]) == (503, "out_of_memory")
        assert peak_bytes(process.pid) < 4 * NUMBERS


def test_graph_that_exceeds_time_limit_is_reported_as_broken(writable_store, digits_store, graphs):
    version = publish_again(
        writable_store, digits_store, "digits", network=make_endless(graphs["network"])
    )
    stop, before = threading.Event(), children(os.getpid())
    runner = Preflights(Settings(store=writable_store.root, preflight_timeout_s=0.5), stop)
    with pytest.raises(BrokenArtifact, match=r"expected a prediction within 0.5 s, got none"):
        runner.check(writable_store.manifest("digits", version))
    stop.set()
    runner.close()
    assert children(os.getpid()) <= before


def test_repeated_submission_reuses_first_preflight(preflights, writable_store):
    runner, _ = preflights
    manifest = writable_store.manifest("digits", "1")
    first = runner.submit(manifest)
    assert first.result() is None
    assert runner.submit(manifest) is first


def test_preflight_environment_contains_no_keys_or_bucket_credentials(monkeypatch):
    for name in (
        "DUBITO_API_KEYS",
        "AWS_SECRET_ACCESS_KEY",
        "AZURE_STORAGE_KEY",
        "GOOGLE_APPLICATION_CREDENTIALS",
    ):
        monkeypatch.setenv(name, KEY)
    with closing(PreflightProcess()) as process:
        environment = Path(f"/proc/{process._process.pid}/environ")
        wait_until(environment.read_bytes)  # The environment is empty until Python runs.
        content = environment.read_bytes()
        assert process.run(Path("/nowhere"), "m", "1", 30.0).file == "manifest.json"
    assert b"PYTHONPATH" in content
    assert KEY.encode() not in content


def test_disabled_preflights_complete_at_once(writable_store):
    stop = threading.Event()
    runner = Preflights(Settings(store=writable_store.root, preflight_timeout_s=0), stop)
    assert runner.submit(writable_store.manifest("digits", "1")).done()
    stop.set()
    runner.close()
