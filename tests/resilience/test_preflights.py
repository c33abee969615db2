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
from tests.support.graphs import endless, hungry, hungry_at
from tests.support.process import children, is_running, most_bytes
from tests.support.serving import SOON, predict_blank, wait_until
from tests.support.stores import publish_again

MANY = 300_000_000  # numbers, 1.2 GB
BYTES = 512 << 20
WITHIN = {**SOON, "DUBITO_PREFLIGHT_TIMEOUT_S": "60", "DUBITO_DEFAULT_MODEL": "digits"}
KEY = "a-key-of-the-interface"


@pytest.fixture
def graphs(digits_store):
    """Both graphs of `digits`."""
    files = ModelStore(digits_store).open("digits", "1").files
    return {stem: files[f"{stem}.onnx"] for stem in ("sampler", "network")}


@pytest.fixture
def preflights(own_store, monkeypatch):
    monkeypatch.setattr(limits, "PREFLIGHT_BYTES", BYTES)
    ending = threading.Event()
    created = Preflights(Settings(store=own_store.root, preflight_timeout_s=60), ending)
    yield created, ending
    ending.set()
    created.close()


@pytest.mark.slow
def test_an_endless_graph_stops_neither_the_start_nor_other_models_nor_the_end(
    serve, own_store, digits_store, graphs
):
    publish_again(own_store, digits_store, "a-endless", sampler=endless(graphs["sampler"]))
    settings = {**WITHIN, "DUBITO_API_KEYS": KEY, "DUBITO_PREFLIGHT_TIMEOUT_S": "600"}
    with serve(own_store.root, **settings) as (url, process):
        client = httpx.Client(base_url=url, headers={"X-API-Key": KEY}, timeout=30)
        with client:
            assert predict_blank(client).json()["version"] == "1"
            assert client.get("/health/ready").json()["models"] == {"digits": "1"}
            late = predict_blank(client, model="a-endless", deadline_s=0.5)
            assert (late.status_code, "deadline" in late.json()["detail"]) == (504, True), late.text
            publish_again(own_store, digits_store)
            wait_until(lambda: predict_blank(client).json()["version"] == "2")
            assert client.get("/models/a-endless").json()["serving"] is None
            (trying,) = children(process.pid)
            assert KEY.encode() not in Path(f"/proc/{trying}/environ").read_bytes()
        start = time.monotonic()
        process.terminate()
        assert process.wait(20) in (0, -signal.SIGTERM)
        assert time.monotonic() - start < 5
        assert not is_running(trying)


def test_the_process_that_tries_a_version_ends_with_the_one_that_started_it_however_that_ends():
    code = (
        "import time; from model_store.inference.preflight import PreflightProcess as P; "
        "p = P(); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT) as process:
        wait_until(lambda: any(_is_in_python(pid) for pid in children(process.pid)))
        (trying,) = children(process.pid)
        os.kill(trying, signal.SIGSTOP)
        process.kill()
    wait_until(lambda: not is_running(trying))


def _is_in_python(pid):
    return Path(f"/proc/{pid}/oom_score_adj").read_text().strip() == "1000"


@pytest.mark.parametrize("part", ["sampler", "network"])
@pytest.mark.parametrize("when_loaded", [True, False])
def test_a_graph_that_takes_more_memory_than_it_may_is_broken_by_name(
    preflights, own_store, digits_store, graphs, part, when_loaded
):
    tries, _ = preflights
    odd = hungry(graphs[part], MANY, when_loaded)
    version = publish_again(own_store, digits_store, "digits", **{part: odd})
    with pytest.raises(
        BrokenArtifact, match=rf"digits version {version}: .* more than 536870912 bytes of memory"
    ):
        tries.check(own_store.manifest("digits", version))
    tries.check(own_store.manifest("digits", "1"))


def test_a_version_that_fails_is_named_and_what_was_served_goes_on(
    serve, own_store, digits_store, graphs
):
    limits = {"PREFLIGHT_BYTES": BYTES}
    with (
        serve(own_store.root, limits=limits, **WITHIN) as (url, process),
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        publish_again(own_store, digits_store, network=hungry(graphs["network"], MANY, True))
        wait_until(lambda: "2" in client.get("/models/digits").json()["broken"])
        assert "bytes of memory" in client.get("/models/digits").json()["broken"]["2"]
        assert predict_blank(client).json()["version"] == "1"
        refused = predict_blank(client, version="2")
        assert (refused.status_code, "bytes of memory" in refused.json()["detail"]) == (
            503,
            True,
        )
        wait_until(lambda: not children(process.pid))


def test_a_graph_that_takes_more_memory_at_one_number_of_rows_fails_that_request_alone(
    serve, own_store, digits_store, graphs
):
    publish_again(own_store, digits_store, network=hungry_at(graphs["network"], 3, MANY))
    limits = {"PREFLIGHT_BYTES": BYTES}
    with (
        serve(own_store.root, limits=limits, **WITHIN) as (url, process),
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        for rows in (1, 3, 2, 3, 4):
            answer = client.post("/predict", json={"inputs": [[0] * 64] * rows, "num_samples": 2})
            if rows != 3:
                assert answer.json()["version"] == "2"
                continue
            assert (answer.status_code, answer.json()["code"]) == (503, "out_of_memory")
        assert most_bytes(process.pid) < 4 * MANY


def test_a_graph_that_takes_longer_than_it_may_is_broken_by_name(own_store, digits_store, graphs):
    version = publish_again(own_store, digits_store, "digits", network=endless(graphs["network"]))
    ending, before = threading.Event(), children(os.getpid())
    tries = Preflights(Settings(store=own_store.root, preflight_timeout_s=0.5), ending)
    with pytest.raises(BrokenArtifact, match=r"expected a prediction within 0.5 s, got none"):
        tries.check(own_store.manifest("digits", version))
    ending.set()
    tries.close()
    assert children(os.getpid()) <= before


def test_a_version_is_tried_once_for_all_its_names(preflights, own_store):
    tries, _ = preflights
    manifest = own_store.manifest("digits", "1")
    first = tries.submit(manifest)
    assert first.result() is None
    assert tries.submit(manifest) is first


def test_a_preflight_is_told_no_keys_and_nothing_that_opens_buckets(monkeypatch):
    for name in (
        "DUBITO_API_KEYS",
        "AWS_SECRET_ACCESS_KEY",
        "AZURE_STORAGE_KEY",
        "GOOGLE_APPLICATION_CREDENTIALS",
    ):
        monkeypatch.setenv(name, KEY)
    with closing(PreflightProcess()) as process:
        environment = Path(f"/proc/{process._process.pid}/environ")
        wait_until(environment.read_bytes)  # it has none before it runs Python
        output = environment.read_bytes()
        assert process.run(Path("/nowhere"), "m", "1", 30.0).file == "manifest.json"
    assert b"PYTHONPATH" in output
    assert KEY.encode() not in output


def test_without_preflights_versions_are_loaded_at_once(own_store):
    ending = threading.Event()
    tries = Preflights(Settings(store=own_store.root, preflight_timeout_s=0), ending)
    assert tries.submit(own_store.manifest("digits", "1")).done()
    ending.set()
    tries.close()
