import os
import re
import shutil
import statistics
import threading
import time
from contextlib import suppress
from dataclasses import dataclass

import httpx
import onnx
import pytest
from onnx import numpy_helper

from model_store.artifacts.store import ModelStore
from tests.support.serving import serving
from tests.support.stores import publish_again

ROW = [8.0] * 64
VERSION = re.compile(rb'"version":"(\d+)"')


@dataclass(frozen=True)
class Outcome:
    requests: int
    versions: int
    wrong: list[str]
    seconds: list[float]

    def __str__(self):
        middle, largest = statistics.median(self.seconds), max(self.seconds)
        return (
            f"{self.requests} requests were answered by {self.versions} versions, "
            f"{len(self.wrong)} wrongly or not; "
            f"a moved alias was followed after {middle:.2f} s at the median and {largest:.2f} s at "
            "most"
        )


def changed(sampler):
    graph = onnx.load_model_from_string(sampler)
    floats = [t for t in graph.graph.initializer if t.data_type == onnx.TensorProto.FLOAT]
    largest = max(floats, key=lambda tensor: numpy_helper.to_array(tensor).size)
    largest.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(largest) * 1.5, largest.name))
    return graph.SerializeToString()


def read_log(process):
    with suppress(OSError):
        while os.read(process.stderr.fileno(), 1 << 16):
            pass


def cycle(digits_store, folder, cycles, clients=2, **settings):
    shutil.copytree(digits_store, folder / "models")
    store = ModelStore(folder / "models")
    artifact = store.open("digits", "1")
    other = changed(artifact.files["sampler.onnx"])
    publish_again(store, digits_store, sampler=other)
    store.set_alias("digits", "first", "1")
    store.set_alias("digits", "second", "2")
    request = {"inputs": [ROW], "seed": 7}
    wrong, counts, observed, stop = [], [0] * clients, set(), threading.Event()
    settings = {"DUBITO_POLL_INTERVAL_S": "0.05", "DUBITO_THREADS": "1", **settings}
    with (
        serving(store.root, **settings) as (url, process),
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        threading.Thread(target=read_log, args=[process], daemon=True).start()

        def own(version):
            answer = client.post("/predict", json={**request, "version": version})
            assert VERSION.search(answer.content)[1] == version.encode()
            return VERSION.sub(b"", answer.content)

        answers = {1: own("1"), 0: own("2")}  # by the version's number modulo 2
        assert answers[0] != answers[1]

        def ask(number):
            body = {
                "latest": None,
                "moving": None,
                "first": "1",
                "second": "2",
                "1": "1",
                "2": "2",
            }
            with httpx.Client(base_url=url, timeout=60) as client:
                while not stop.is_set():
                    for version, must_be in body.items():
                        answer = client.post("/predict", json={**request, "version": version})
                        actual = VERSION.search(answer.content)
                        if answer.status_code != 200 or actual is None:
                            wrong.append(f"{version}: {answer.status_code} {answer.text[:200]}")
                        elif VERSION.sub(b"", answer.content) != answers[int(actual[1]) % 2]:
                            wrong.append(f"{version}: not what version {actual[1]} answers")
                        elif must_be is not None and actual[1] != must_be.encode():
                            wrong.append(f"{version}: answered by {actual[1]}")
                        else:
                            observed.add(actual[1])
                        counts[number] += 1

        def followed(alias, version):
            started_at = time.monotonic()
            fields = {**request, "version": alias}
            while client.post("/predict", json=fields).json().get("version") != version:
                assert time.monotonic() < started_at + 60
            seconds.append(time.monotonic() - started_at)

        store.set_alias("digits", "moving", "1")
        askers = [threading.Thread(target=ask, args=[number]) for number in range(clients)]
        seconds = []
        for asker in askers:
            asker.start()
        try:
            for _ in range(cycles):
                before = store.resolve("digits")
                newest = int(store.versions("digits")[-1])
                files = {"sampler": other} if newest % 2 else {}
                version = publish_again(store, digits_store, **files)
                followed("latest", version)
                store.set_alias("digits", "moving", version)
                store.set_alias("digits", "latest", before)
                followed("latest", before)
                store.set_alias("digits", "latest", version)
                store.keep("digits", 2)
        finally:
            stop.set()
            for asker in askers:
                asker.join()
    return Outcome(sum(counts), len(observed), wrong, seconds)


@pytest.mark.slow
def test_publications_and_roll_backs_under_load(digits_store, tmp_path):
    """`CYCLES=1000` runs a thousand cycles, in about ten minutes."""
    outcome = cycle(digits_store, tmp_path, cycles=int(os.environ.get("CYCLES", "10")))
    print(outcome)
    assert outcome.wrong == []
    assert outcome.requests > 50
    assert outcome.versions > 5
