"""Test stores in SeaweedFS and rclone. Requires `make test-real`."""

import random
import subprocess
import sys
import time
import uuid
from itertools import count

import httpx
import numpy as np
import pytest

from model_store.artifacts.store import ModelStore, open_store
from tests.support import tiny
from tests.support.buckets import BUCKET, PROGRAMS, SECRET, SeaweedFS, credentials, rclone
from tests.support.environment import ROOT, environment_with
from tests.support.serving import FAST_POLLING, WITH_PREFLIGHTS, metric, serving, wait_until
from tests.support.storage_properties import PROPERTIES
from tests.support.stores import tiny_description, tiny_files

MISSING = [name for name, path in PROGRAMS.items() if not path.exists()]

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}"),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    seaweed = SeaweedFS(tmp_path_factory.mktemp("seaweed"))
    try:
        seaweed.start()
        yield seaweed
    finally:
        seaweed.stop()


@pytest.fixture
def url(server, monkeypatch):
    for name, value in credentials(server.url).items():
        monkeypatch.setenv(name, value)
    return f"s3://{BUCKET}/{uuid.uuid4().hex}"


@pytest.mark.parametrize("check_property", PROPERTIES, ids=lambda check: check.__name__)
def test_bucket_has_store_property(url, tmp_path, check_property):
    numbers = count()
    check_property(lambda: open_store(url, cache=tmp_path / str(next(numbers))))


PUBLISHER = """
import os, sys
from pathlib import Path
from model_store.artifacts.manifest import FILES, Description
from model_store.artifacts.store import open_store

store = open_store(sys.argv[1], cache=Path(sys.argv[3]))
description = Description.model_validate_json(sys.argv[2])
print("ready", flush=True)
while True:
    version = store.publish("m", description, {file: os.urandom(20_000) for file in FILES}).version
    store.set_alias("m", "champion", version)
    store.keep("m", 4)
"""


def test_killed_concurrent_publishers_leave_no_partial_version(url, tmp_path):
    """Kill 30 writers, three at a time, while they publish, move an alias and delete versions."""
    store = open_store(url, cache=tmp_path / "reader")
    published = int(store.publish("m", tiny_description(), tiny_files()).version)
    for batch in range(10):
        arguments = [url, tiny_description().model_dump_json(), str(tmp_path / "writers")]
        command = [sys.executable, "-c", PUBLISHER, *arguments]
        writers = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) for _ in range(3)]
        for writer in writers:
            assert writer.stdout.readline() == b"ready\n"
        time.sleep(random.uniform(0.0, 0.5))
        for writer in writers:
            writer.kill()
            writer.communicate()
        versions = store.versions("m")
        assert int(versions[-1]) >= published
        published = int(versions[-1])
        for version in {*versions, *store.aliases("m").values()}:
            assert (
                open_store(url, cache=tmp_path / f"{batch}").open("m", version).manifest.version
                == version
            )
    assert published > 1
    latest = store.publish("m", tiny_description(), tiny_files()).version
    assert int(latest) > published
    assert store.resolve("m") == latest


def test_service_keeps_serving_while_bucket_is_unavailable(server, url, tmp_path):
    store = open_store(url, cache=tmp_path / "writer")
    tiny.publish(store)
    settings = {
        **FAST_POLLING,
        **WITH_PREFLIGHTS,
        "DUBITO_CACHE": str(tmp_path / "cache"),
        "DUBITO_JOBS_AT_ONCE": "0",
    }

    def version(address):
        answer = httpx.post(
            f"{address}/predict", json={"inputs": [[0.1, 0.2, 0.3]], "seed": 1}, timeout=60
        )
        return answer.json()["version"] if answer.status_code == 200 else str(answer.status_code)

    def is_reachable(address):
        return metric(httpx.get(f"{address}/metrics").text, "dubito_store_reachable")

    with serving(url, **settings) as (address, _):
        wait_until(lambda: version(address) == "1", 60)
        tiny.publish(store)
        wait_until(lambda: version(address) == "2", 60)
        server.stop()
        try:
            wait_until(lambda: is_reachable(address) == 0, 60)
            assert version(address) == "2"
            assert httpx.get(f"{address}/health/ready").status_code == 200
            with serving(url, **settings) as (new_address, _):  # start without the bucket
                wait_until(lambda: version(new_address) == "2", 60)
                assert is_reachable(new_address) == 0
        finally:
            server.start()
        wait_until(lambda: is_reachable(address) == 1, 60)
        tiny.publish(store)
        wait_until(lambda: version(address) == "3", 60)


def test_workers_and_jobs_load_versions_from_bucket(url, tmp_path):
    store = open_store(url, cache=tmp_path / "writer")
    tiny.publish(store)
    settings = {
        **FAST_POLLING,
        **WITH_PREFLIGHTS,
        "DUBITO_CACHE": str(tmp_path / "cache"),
        "DUBITO_WORKERS": "2",
    }
    with serving(url, **settings) as (address, _):
        wait_until(lambda: httpx.get(f"{address}/health/ready").status_code == 200, 60)
        request = {"inputs": [[0.1, 0.2, 0.3]] * 4, "seed": 1}
        job = httpx.post(f"{address}/predict/jobs", json=request, timeout=60)
        assert job.status_code == 202, job.text
        path = f"{address}/jobs/{job.json()['id']}"
        wait_until(lambda: httpx.get(path).json()["state"] in ("done", "failed"), 300)
        assert httpx.get(path).json()["state"] == "done", httpx.get(path).text


def run(*command, **environment):
    completed = subprocess.run(
        [sys.executable, "-m", *command],
        env=environment_with(**environment),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return completed.returncode, completed.stdout + completed.stderr


def test_commands_accept_bucket_url(url, tmp_path, quick_recipe):
    """Fit, evaluate and recalibrate in a bucket, then list and delete the models."""
    from training.data.arrays import digits

    rows = digits().test
    np.savez(tmp_path / "rows.npz", x=rows.x.reshape(-1, 8, 8), y=rows.y)
    settings = {
        "DUBITO_STORE": url,
        "DUBITO_CACHE": str(tmp_path / "cache"),
        "DUBITO_RUNS": str(tmp_path / "runs"),
        "DUBITO_DATA": str(tmp_path),
        "OMP_NUM_THREADS": "1",
    }
    commands = [
        ("training", "fit", str(quick_recipe), "--quiet", "--device", "cpu"),
        ("training", "evaluate", "digits", "--rows", "32", "--quiet"),
        ("training", "calibrate", "digits", "--data", "npz:rows.npz", "--as", "again", "--quiet"),
        ("model_store", "alias", "digits", "champion", "1"),
        ("model_store", "verify"),
    ]
    for command in commands:
        code, output = run(*command, **settings)
        assert code == 0, output
        assert SECRET not in output
    code, output = run("model_store", "list", **settings)
    assert (
        output
        == "again: versions 1 (latest -> 1)\ndigits: versions 1 (champion -> 1, latest -> 1)\n"
    )
    _, output = run(
        "model_store", "--store", url, "show", "digits", **{**settings, "DUBITO_STORE": "elsewhere"}
    )
    assert "created 20" in output  # the report
    code, output = run("model_store", "delete", "digits", "--force", **settings)
    assert (code, open_store(url, cache=tmp_path / "other").names()) == (0, ["again"])


def test_server_without_conditional_writes_is_read_only(tmp_path, monkeypatch):
    with rclone(tmp_path / "rclone") as address:
        tiny.publish(ModelStore(tmp_path / "rclone" / BUCKET / "prefix"), "m")
        settings = {
            **credentials(address),
            "DUBITO_STORE": f"s3://{BUCKET}/prefix",
            "DUBITO_CACHE": str(tmp_path / "c"),
        }
        assert run("model_store", "verify", **settings) == (0, "m version 1: whole\n")
        for command in (
            ("alias", "m", "champion", "1"),
            ("keep", "m", "1"),
            ("delete", "m", "--force"),
        ):
            code, output = run("model_store", *command, **settings)
            assert code == 2
            assert output.startswith(
                "error: DUBITO_STORE: expected a bucket with conditional writes, got one that"
            )
            assert "ignores If-None-Match" in output and len(output.splitlines()) == 1
        code, output = run("training", "prune", "m", "--fraction", "0.5", **settings)
        assert code != 0 and "ignores If-None-Match" in output


INVALID_SETTINGS = {
    "no credentials": {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""},
    "another secret": {"AWS_SECRET_ACCESS_KEY": "another-secret-of-tests"},
    "no such bucket": {"DUBITO_STORE": "s3://elsewhere/prefix"},
    "plain http": {"AWS_ALLOW_HTTP": "false"},
}


@pytest.mark.parametrize("case", INVALID_SETTINGS)
@pytest.mark.parametrize("command", [("model_store", "list"), ("training", "evaluate", "m")])
def test_invalid_settings_print_one_line(url, tmp_path, case, command):
    settings = {"DUBITO_STORE": url, "DUBITO_CACHE": str(tmp_path), **INVALID_SETTINGS[case]}
    code, output = run(*command, **settings)
    assert code in (1, 2), output
    (line,) = output.splitlines()
    assert "error: " in line and "s3://" in line
    assert SECRET not in line and "another-secret" not in line
