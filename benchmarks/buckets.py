"""A store in a bucket beside one in a folder: `python -m benchmarks.buckets s3://bucket/prefix`,
the page's text.

The bucket is reached by the environment (docs/buckets.md), and what is written there is deleted.
`digits` of DUBITO_STORE, a folder, is published and loaded in turns at both places; memory is that
of a version of 256 MiB.
"""

import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from model_store.artifacts.bucket import Bucket
from model_store.artifacts.manifest import FILES, Description
from model_store.artifacts.place import open_store
from model_store.artifacts.store import ModelStore
from model_store.inference.model import NEEDED, Model

ROUNDS = 15
LOOKS = 50
LARGE = 256 << 20
STEPS = ("publish", "open", "verify")


def main() -> None:
    url = f"{sys.argv[1].rstrip('/')}/{uuid.uuid4().hex}"
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        bucket = open_store(url, cache=folder / "of-the-writer")
        try:
            print_times(source_store(), bucket, url, folder)
            print_memory(url, folder)
        finally:
            for name in bucket.names():
                bucket.delete(name, force=True)


def parts(source: ModelStore) -> tuple[Description, dict[str, bytes]]:
    """What `digits` is published of."""
    artifact = source.open("digits", source.resolve("digits"), wanted=FILES)
    description = Description.model_validate(
        artifact.manifest.model_dump(include=set(Description.model_fields))
    )
    return description, {file: artifact.files[file] for file in FILES}


def source_store() -> ModelStore:
    return ModelStore(Path(os.environ.get("DUBITO_STORE", "models")))


def print_times(source: ModelStore, bucket: ModelStore, url: str, folder: Path) -> None:
    description, files = parts(source)
    beside = open_store(folder / "models")
    publish: dict[str, list[float]] = {"folder": [], "bucket": []}
    load: dict[str, list[float]] = {"folder": [], "bucket": [], "bucket, with a copy": []}
    bucket.storage.check_writable()
    for number in range(ROUNDS):
        for place, store in (("folder", beside), ("bucket", bucket)):
            publish[place].append(seconds(partial(store.publish, "digits", description, files)))
        version, cache = str(number + 1), folder / f"reader-{number}"
        for place, store in (
            ("folder", open_store(folder / "models")),
            ("bucket", open_store(url, cache=cache)),
            ("bucket, with a copy", open_store(url, cache=cache)),
        ):
            load[place].append(seconds(partial(loaded, store, version)))
    reader = open_store(url, cache=folder / "of-the-reader")
    assert isinstance(reader.storage, Bucket)
    looks = [seconds(reader.storage.look) for _ in range(LOOKS)]
    size = sum(map(len, files.values()))
    print("# A store in a bucket beside one in a folder\n")
    print(
        "`python -m benchmarks.buckets` against SeaweedFS on the same machine, two cores shared "
        "with other work."
    )
    print(f"`digits`, {size:,} bytes; medians of {ROUNDS} in turns, ms (least to most):\n")
    print("| | folder | bucket | bucket, with a copy |\n|---|---|---|---|")
    print(f"| publish | {shown(publish['folder'])} | {shown(publish['bucket'])} | |")
    print(f"| open, verify and load | {' | '.join(shown(load[place]) for place in load)} |")
    print(f"| look of the service at {ROUNDS} versions, one request | | {shown(looks)} | |")


def loaded(store: ModelStore, version: str) -> Model:
    return Model.load(store.open("digits", version, NEEDED), threads=1)


def print_memory(url: str, folder: Path) -> None:
    print(
        f"\nA version of {LARGE >> 20} MiB, each step in a process of its own: MiB by which it "
        "raises the peak.\n"
    )
    print("| | folder | bucket |\n|---|---|---|")
    found = {}
    for place, at in (("folder", str(folder / "large")), ("bucket", url)):
        for step in STEPS:
            command = [
                sys.executable,
                "-m",
                "benchmarks.buckets",
                "--memory",
                step,
                at,
                str(folder / f"{place}-{step}"),
            ]
            found[place, step] = subprocess.run(
                command, stdout=subprocess.PIPE, text=True, check=True
            ).stdout.strip()
    meaning = {
        "publish": "publish, the content in memory before",
        "open": "open, and keep it",
        "verify": "verify it alone",
    }
    for step in STEPS:
        print(f"| {meaning[step]} | {found['folder', step]} | {found['bucket', step]} |")


def print_peak(step: str, place: str, cache: str) -> None:
    """Print how many MiB a step takes at its peak beyond what the process had."""
    description, files = parts(source_store())
    store = open_store(place, cache=Path(cache))
    content = np.random.default_rng().bytes(LARGE) if step == "publish" else b""
    store.names()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if step == "publish":
        store.publish("large", description, files | {"weights.safetensors": content})
    else:
        artifact = store.open(
            "large", store.resolve("large"), ("weights.safetensors",) if step == "open" else ()
        )
        assert bool(artifact.files) == (step == "open")
    print(round((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024))


def seconds(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def shown(times: list[float]) -> str:
    return f"{1000 * statistics.median(times):.1f} ({1000 * min(times):.1f} to {1000 * max(times):.1f})"


if __name__ == "__main__":
    if sys.argv[1] == "--memory":
        print_peak(*sys.argv[2:])
    else:
        main()
