import os
import shutil
import threading
import time

import httpx
import onnx
import pytest
from onnx import numpy_helper

from model_store.artifacts.store import ModelStore
from tests.support.serving import serving
from tests.support.stores import publish_again

REQUEST = {"inputs": [[8.0] * 64], "seed": 7}
SETTINGS = {"DUBITO_POLL_INTERVAL_S": "0.05", "DUBITO_THREADS": "1"}


def scale_weights(sampler):
    graph = onnx.load_model_from_string(sampler)
    floats = [t for t in graph.graph.initializer if t.data_type == onnx.TensorProto.FLOAT]
    largest = max(floats, key=lambda tensor: numpy_helper.to_array(tensor).size)
    largest.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(largest) * 1.5, largest.name))
    return graph.SerializeToString()


@pytest.mark.slow
def test_publication_and_rollback_under_load(digits_store, tmp_path):
    """`CYCLES=1000` runs a thousand cycles, in about ten minutes."""
    shutil.copytree(digits_store, tmp_path / "models")
    store = ModelStore(tmp_path / "models")
    scaled = scale_weights(store.open("digits", "1").files["sampler.onnx"])
    publish_again(store, digits_store, sampler=scaled)
    errors, versions, stop = [], set(), threading.Event()
    with (
        serving(store.root, **SETTINGS) as (url, _),
        httpx.Client(base_url=url, timeout=60) as client,
    ):

        def predict(version):
            return client.post("/predict", json={**REQUEST, "version": version})

        expected = [predict(version).json()["predictions"] for version in ("2", "1")]
        assert expected[0] != expected[1]

        def poll():
            while not stop.is_set():
                for version in ("latest", "moving", "1", "2"):
                    response = predict(version)
                    content = response.json()
                    actual = content.get("version", "0")
                    if (
                        version not in ("latest", "moving", actual)
                        or content.get("predictions") != expected[int(actual) % 2]
                    ):
                        errors.append(f"{version}: {response.status_code} {response.text[:200]}")
                    versions.add(actual)

        def move_latest(version):
            store.set_alias("digits", "latest", version)
            end = time.monotonic() + 60
            while predict("latest").json().get("version") != version:
                assert time.monotonic() < end

        store.set_alias("digits", "first", "1")
        store.set_alias("digits", "second", "2")
        store.set_alias("digits", "moving", "1")
        threads = [threading.Thread(target=poll) for _ in range(2)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(int(os.environ.get("CYCLES", "10"))):
                before, newest = store.resolve("digits"), int(store.versions("digits")[-1])
                files = {"sampler": scaled} if newest % 2 else {}
                version = publish_again(store, digits_store, **files)
                move_latest(version)
                store.set_alias("digits", "moving", version)
                move_latest(before)
                move_latest(version)
                store.keep("digits", 2)
        finally:
            stop.set()
            for thread in threads:
                thread.join()
    assert errors == []
    assert len(versions) > 5
