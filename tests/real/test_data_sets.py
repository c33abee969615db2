"""Test data sets on Ray clusters and in buckets. Requires `make test-real`."""

import json
import subprocess
import sys
import uuid

import pytest
from obstore.store import S3Store

from tests.support import ray_cluster
from tests.support.buckets import BUCKET, KEY, PROGRAMS, SECRET, SeaweedFS, credentials, rclone
from tests.support.data_sets import get_content, write_digits
from tests.support.environment import ROOT, environment_with

RAY = ROOT / ".venv-ray" / "bin" / "python"
MISSING = [name for name, path in PROGRAMS.items() if not path.exists()]
with_ray = pytest.mark.skipif(not RAY.exists(), reason="not installed: ray")
with_buckets = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")
pytestmark = pytest.mark.real
SHARDS = ["--seed", "1", "--shard-rows", "250"]


def command(*arguments, python=sys.executable, **environment):
    """Run `python -m service`."""
    return subprocess.run(
        [str(python), "-m", "service", *map(str, arguments)],
        cwd=ROOT,
        env=environment_with(**environment),
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture(scope="module")
def data(tmp_path_factory, digits_rows):
    """Two files of 2,000 rows."""
    folder = tmp_path_factory.mktemp("whole") / "data"
    write_digits(folder, digits_rows, 2, 2000)
    return folder


@pytest.fixture(scope="module")
def scored(data, digits_store, tmp_path_factory):
    """The output folder of a local `score`."""
    out = tmp_path_factory.mktemp("scored") / "out"
    completed = command(
        "score",
        data,
        "--out",
        out,
        "--num-samples",
        "1000",
        *SHARDS,
        DUBITO_STORE=str(digits_store),
    )
    assert completed.returncode == 0, completed.stderr
    return out


@with_ray
def test_cluster_output_is_unchanged_if_workers_nodes_or_driver_are_killed(
    data, scored, digits_store, tmp_path
):
    config = {
        "nodes": 3,
        "command": [
            "score",
            str(data),
            "--out",
            str(tmp_path / "out"),
            "--num-samples",
            "1000",
            *SHARDS,
        ],
        "kills": [[8, "worker"], [1, "node"], [1, "worker"], [2, "driver"]],
    }
    completed = ray_cluster.run(RAY, config, environment_with(DUBITO_STORE=str(digits_store)), 300)
    assert completed["code"] == 0, completed
    assert get_content(tmp_path / "out") == get_content(scored)


@with_ray
def test_local_ray_prints_only_the_same_ranking(data, digits_store):
    arguments = [
        "rank",
        data,
        "-k",
        "20",
        "--acquisition",
        "power_bald",
        "--num-samples",
        "10",
        *SHARDS,
    ]
    local = command(*arguments, DUBITO_STORE=str(digits_store))
    distributed = command(
        *arguments, "--ray", "local", "--quiet", python=RAY, DUBITO_STORE=str(digits_store)
    )
    assert (distributed.returncode, distributed.stderr) == (0, "")
    assert json.loads(distributed.stdout) == json.loads(local.stdout)


@with_ray
def test_invalid_cluster_address_prints_one_line(data, digits_store, tmp_path):
    store = {"DUBITO_STORE": str(digits_store)}
    completed = command(
        "score", data, "--out", tmp_path / "out", "--ray", "nonsense", python=RAY, **store
    )
    assert completed.returncode == 2
    assert completed.stderr.startswith("error: ray: expected the address of a cluster")
    assert completed.stderr.count("\n") == 1


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    seaweed = SeaweedFS(tmp_path_factory.mktemp("seaweed"))
    try:
        seaweed.start()
        yield seaweed
    finally:
        seaweed.stop()


@pytest.fixture
def bucket(server):
    """A client for the bucket."""
    options = {
        "endpoint": server.url,
        "access_key_id": KEY,
        "secret_access_key": SECRET,
        "region": "us-east-1",
    }
    return S3Store(BUCKET, **options, client_options={"allow_http": True})


@with_buckets
def test_source_output_and_store_can_be_in_buckets(
    server, bucket, data, scored, digits_store, tmp_path
):
    root = uuid.uuid4().hex
    for part, folder in (("data", data), ("models", digits_store)):
        for path in folder.rglob("*"):
            if path.is_file() and not path.name.startswith("."):
                bucket.put(f"{root}/{part}/{path.relative_to(folder)}", path.read_bytes())
    url = f"s3://{BUCKET}/{root}"
    environment = credentials(server.url) | {
        "DUBITO_STORE": f"{url}/models",
        "DUBITO_CACHE": str(tmp_path / "cache"),
    }
    arguments = ["score", f"{url}/data", "--out", f"{url}/out", "--num-samples", "1000", *SHARDS]
    for _ in range(2):  # two parts are missing the second time
        completed = command(*arguments, **environment)
        assert completed.returncode == 0, completed.stderr
        names = [entry["path"] for entry in bucket.list(f"{root}/out").collect()]
        actual = {
            name.removeprefix(f"{root}/out/"): bytes(bucket.get(name).bytes()) for name in names
        }
        expected = get_content(scored)
        stamps = actual.pop("job.json"), expected.pop("job.json")
        assert json.loads(stamps[0])["request"] == json.loads(stamps[1])["request"]
        assert actual == expected
        bucket.delete(
            [f"{root}/out/part-00003-of-00016.parquet", f"{root}/out/part-00009-of-00016.parquet"]
        )
    ranked = command("rank", f"{url}/data/1.parquet", "-k", "5", *SHARDS, **environment)
    local = command("rank", data / "1.parquet", "-k", "5", *SHARDS, DUBITO_STORE=str(digits_store))
    assert (ranked.returncode, json.loads(ranked.stdout)) == (0, json.loads(local.stdout))


@with_buckets
def test_bucket_errors_print_one_line(server, data, digits_store, tmp_path):
    valid = credentials(server.url) | {"DUBITO_STORE": str(digits_store)}

    def check_error(source, out, message, **changes):
        environment = {
            name: value for name, value in (valid | changes).items() if value is not None
        }
        completed = command("score", source, "--out", out, **environment)
        assert completed.returncode == 2, completed
        assert completed.stderr.count("\n") == 1
        assert completed.stderr.startswith(f"error: {message}"), completed.stderr
        assert SECRET not in completed.stderr

    absent, output = f"s3://{BUCKET}/absent", f"s3://{BUCKET}/{uuid.uuid4().hex}"
    no_credentials = {"AWS_ACCESS_KEY_ID": None, "AWS_SECRET_ACCESS_KEY": None}
    check_error(
        data, "s3://nowhere/out", "cannot list in s3://nowhere/out: there is no such bucket"
    )
    check_error(
        "s3://nowhere/data", output, "cannot list in s3://nowhere/data: there is no such bucket"
    )
    check_error(absent, output, "source: expected a data set of .parquet files, got none")
    check_error(data, output, "cannot list in", AWS_SECRET_ACCESS_KEY="another-secret")
    check_error(
        data, output, f"cannot list in {output}: there are no credentials", **no_credentials
    )
    check_error(
        data,
        "s3://key:secret@models/out",
        "out: expected a folder, or a URL such as s3://bucket/prefix",
    )
    with rclone(tmp_path / "rclone") as url:
        check_error(
            data,
            output,
            "out: expected a bucket with conditional writes",
            **credentials(url),
        )
