"""Test replicas on a Ray cluster. Requires `make test-real`."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import httpx
import pytest
import yaml

from tests.support.clusters import (
    PYTHON,
    QUIET,
    Load,
    cluster,
    get_expected_answers,
    nodes,
    replicas,
    send_command,
)
from tests.support.environment import ROOT, environment_with
from tests.support.ports import free_port
from tests.support.serving import is_responding, metric, serving, wait_until
from tests.support.stores import publish_again

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not PYTHON.exists(), reason="Ray is not installed"),
]

KEYS = {"DUBITO_API_KEYS": "secret-of-all-the-nodes"}
ADMIN = {"X-API-Key": "the-key-of-the-administrator"}
ROWS = 40
DIGITS = {"model": "digits", "version": "1"}


def worker_metrics(url, **labels):
    name = labels.pop("name", "dubito_ready")
    page = httpx.get(f"{url}/metrics", headers=ADMIN, timeout=60).text
    names = {
        line.split('worker="')[1].split('"')[0]
        for line in page.splitlines()
        if line.startswith(f"{name}{{")
    }
    return {worker: metric(page, name, worker=worker, **labels) for worker in names}


def test_replicas_behave_like_one_service(writable_store, digits_store, digits_rows, tmp_path):
    rows = digits_rows[:ROWS]
    settings = {"DUBITO_ADMIN_KEY": ADMIN["X-API-Key"], "DUBITO_POLL_INTERVAL_S": "1"}
    pool = {"pool": digits_rows[:100].tolist(), "k": 10, "seed": 5, "acquisition": "batchbald"}
    invalid_requests = [
        {"inputs": [[1.0] * 63]},
        {"inputs": []},
        {"inputs": [[0.0] * 64], "model": "x"},
        {"inputs": [["a"] * 64]},
    ]
    with serving(writable_store.root, **settings) as (url, _):
        expected = get_expected_answers(url, rows)
        expected_ranking = httpx.post(f"{url}/acquire", json=pool, timeout=60).content
        expected_errors = [
            httpx.post(f"{url}/predict", json=request, timeout=60) for request in invalid_requests
        ]
    with (
        cluster(writable_store.root, tmp_path, **settings) as (url, log),
        httpx.Client(timeout=60) as client,
    ):
        wait_until(lambda: len(worker_metrics(url)) == 2)
        for request, answer in expected * 3:
            assert httpx.post(f"{url}/predict", json=request, timeout=60).content == answer
        for _ in range(4):
            assert httpx.post(f"{url}/acquire", json=pool, timeout=60).content == expected_ranking
        for request, answer in zip(invalid_requests, expected_errors, strict=True):
            response = client.post(f"{url}/predict", json=request)
            assert (response.status_code, response.content) == (answer.status_code, answer.content)

        # Each replica has a separate drift test and counters. A reset reaches all replicas.
        for start in range(0, 160, 4):
            httpx.post(
                f"{url}/predict",
                json={"inputs": digits_rows[start : start + 4].tolist()},
                timeout=60,
            )
        counts = {"name": "dubito_flag_p_value_count", **DIGITS}
        wait_until(lambda: sum(worker_metrics(url, **counts).values()) == 160)
        wait_until(lambda: min(worker_metrics(url, **counts).values()) > 0)
        answer = client.post(f"{url}/admin/models/digits/versions/1/drift/reset", headers=ADMIN)
        assert answer.json()["reset"]
        wait_until(lambda: sum(worker_metrics(url, **counts).values()) == 0)

        # A driver without the token cannot join Ray.
        join = [str(PYTHON), "-c", "import ray; ray.init(address='auto', log_to_driver=False)"]
        environment = {**environment_with(), **QUIET, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
        completed = subprocess.run(
            join, env=environment, capture_output=True, text=True, timeout=60, check=False
        )
        assert (
            completed.returncode == 1
            and "Authentication token is missing or incorrect" in completed.stderr
        )

        # The other replica loads a new version when it polls the store.
        publish_again(writable_store, digits_store)
        assert (
            client.post(f"{url}/admin/refresh", headers=ADMIN).json()["models"]["digits"]["serving"]
            == "2"
        )
        loaded = {"name": "dubito_loaded_version", "model": "digits", "version": "2"}
        wait_until(lambda: list(worker_metrics(url, **loaded).values()) == [1.0, 1.0])

        # Both replicas share a state folder on this machine, so jobs work.
        job = client.post(
            f"{url}/predict/jobs", json={"inputs": rows.tolist(), "seed": 3, "version": "1"}
        ).json()
        wait_until(lambda: client.get(f"{url}/jobs/{job['id']}").json()["state"] == "done", 60)
        log_text = log.read_text()
    assert "Traceback" not in log_text and ADMIN["X-API-Key"] not in log_text
    wait_until(lambda: replicas() == [])


def find_listening_addresses():
    tables = [Path(f"/proc/net/{name}").read_text() for name in ("tcp", "tcp6")]
    lines = [line for table in tables for line in table.splitlines()]
    return {line.split()[1] for line in lines if line.split()[3] == "0A"}


@pytest.mark.parametrize("options", [[], ["--by-model"]], ids=["HAProxy", "Ray's proxy"])
def test_local_cluster_listens_only_on_loopback(digits_store, tmp_path, options):
    before = find_listening_addresses()
    with cluster(digits_store, tmp_path, options) as (url, _):
        assert is_responding(f"{url}/models")
        opened = find_listening_addresses() - before
    assert f"{int(url.rpartition(':')[2]):04X}" in {
        address.rpartition(":")[2] for address in opened
    }
    assert len(opened) > 5
    loopback = (
        "0100007F:",
        "00000000000000000000000001000000:",
        "0000000000000000FFFF00000100007F:",
    )
    assert [address for address in opened if not address.startswith(loopback)] == []


@pytest.mark.parametrize("options", [[], ["--by-model"]], ids=["HAProxy", "Ray's proxy"])
def test_overloaded_replicas_return_429_with_retry_after(digits_store, tmp_path, options):
    settings = {"DUBITO_MEMORY_BUDGET_BYTES": str(6 << 20)}
    with cluster(digits_store, tmp_path, options, **settings) as (url, _):
        with Load(url, {"1": [({"inputs": [[0.0] * 64] * 500}, b"")]}, threads=12) as load:
            wait_until(lambda: load.statuses["429"] > 20 and load.statuses["200"] > 5)
        assert set(load.statuses) <= {"200", "429"}, load.refusals
        assert load.retry_after >= {"1"}


def test_lost_nodes_and_replicas_cause_no_wrong_answers(
    writable_store, digits_store, digits_rows, tmp_path
):
    with serving(writable_store.root) as (url, _):
        expected = {"1": get_expected_answers(url, digits_rows[:ROWS])}
        publish_again(writable_store, digits_store)
        wait_until(lambda: httpx.get(f"{url}/models/digits").json()["serving"] == "2")
        expected["2"] = get_expected_answers(url, digits_rows[:ROWS])
    writable_store.set_alias("digits", "latest", "1")
    recovery = {}
    options = ["--replicas", "2", "--one-proxy"]
    with nodes(0, 2, 2) as (address, process):
        settings = {
            "DUBITO_THREADS": "1",
            "DUBITO_POLL_INTERVAL_S": "0.2",
            "RAY_SERVE_ENABLE_HA_PROXY": "0",
        }
        with cluster(writable_store.root, tmp_path, [*options, "--ray", address], **settings) as (
            url,
            log,
        ):
            wait_until(lambda: len(replicas()) == 2, 60)
            with Load(url, expected) as load:
                load.wait_for(50)
                writable_store.set_alias("digits", "latest", "2")
                since = time.monotonic()
                wait_until(lambda: load.correct and load.correct[-1][1] == "2", 30)
                load.wait_for(100)
                assert {version for _, version in load.correct[-50:]} == {"2"}
                assert set(load.statuses) == {"200"}, load.refusals
                recovery["new version"] = load.longest_pause_s(since)

                since, before = time.monotonic(), set(replicas())
                stopped_pid = min(before)
                os.kill(stopped_pid, signal.SIGSTOP)
                # A new replica replaces it on the remaining processors.
                wait_until(lambda: set(replicas()) - before, 120)
                load.wait_for(100)
                recovery["hung replica"] = load.longest_pause_s(since)
                os.kill(stopped_pid, signal.SIGKILL)

                since = time.monotonic()
                send_command(process, "kill 2")
                load.wait_for(100)
                recovery["lost node"] = load.longest_pause_s(since)
                send_command(process, "add 2")
                wait_until(lambda: len(replicas()) == 2, 120)
                load.wait_for(100)
            assert load.wrong == []
            print(recovery, dict(load.statuses))
            assert max(recovery.values()) < 30
            assert "Traceback" not in log.read_text()


def test_requests_for_a_model_go_to_replica_with_it_in_memory(
    writable_store, digits_store, tmp_path
):
    publish_again(writable_store, digits_store, name="other")
    with serving(writable_store.root) as (url, _):
        (size,) = next(
            m for m in httpx.get(f"{url}/models").json()["models"] if m["name"] == "digits"
        )["in_memory"].values()
    with cluster(
        writable_store.root, tmp_path, ["--by-model"], DUBITO_MAX_MODEL_BYTES=str(size * 3 // 2)
    ) as (url, _):

        def predict(model, times):
            headers = {"serve_multiplexed_model_id": model}
            request = {"inputs": [[0.0] * 64], "model": model, "seed": 1}
            for _ in range(times):
                assert (
                    httpx.post(
                        f"{url}/predict", json=request, headers=headers, timeout=60
                    ).status_code
                    == 200
                )

        def count_answers():
            time.sleep(6)  # until all replicas have exported their metrics
            return worker_metrics(url, name="dubito_requests_total", route="/predict", status="200")

        wait_until(lambda: len(worker_metrics(url)) == 2)
        predict("digits", 1)  # one replica loads it and drops the other model
        before = count_answers()
        predict("digits", 10)
        between = count_answers()
        predict("other", 10)
        after = count_answers()
        digits_counts = {worker: between[worker] - before[worker] for worker in before}
        other_counts = {worker: after[worker] - between[worker] for worker in before}
        assert sorted(digits_counts.values()) == sorted(other_counts.values()) == [0, 10]
        assert digits_counts != other_counts


def test_cluster_adds_replicas_under_load(digits_store, digits_rows, tmp_path):
    request = {"inputs": [list(map(float, row)) for row in digits_rows] * 4}
    with cluster(
        digits_store, tmp_path, ["--replicas", "1", "--max-replicas", "2"], DUBITO_THREADS="1"
    ) as (url, _):
        assert len(replicas()) == 1
        with Load(url, {"1": [(request, b"")]}, threads=8):
            wait_until(lambda: len(replicas()) == 2, 300)


def test_config_file_in_guide_works(digits_store, tmp_path):
    (text,) = re.findall(
        r"```yaml\n(# serve.yaml\n.*?)```", (ROOT / "docs" / "cluster.md").read_text(), re.DOTALL
    )
    config = yaml.safe_load(text)
    port = free_port()
    config["http_options"] |= {"host": "127.0.0.1", "port": port}
    (application,) = config["applications"]
    del application["args"]["keys_file"]
    application["args"]["store"] = str(digits_store)
    (deployment,) = application["deployments"]
    deployment["ray_actor_options"]["num_cpus"] = 0.5
    path, log = tmp_path / "serve.yaml", tmp_path / "log"
    path.write_text(yaml.safe_dump(config))
    url, environment = f"http://127.0.0.1:{port}", {**environment_with(), **QUIET}
    with log.open("w") as file:
        command = [str(PYTHON.with_name("serve")), "run", str(path)]
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=file)
    try:
        wait_until(lambda: process.poll() is not None or is_responding(f"{url}/models"), 300)
        answer = httpx.post(f"{url}/predict", json={"inputs": [[0.0] * 64], "seed": 1}, timeout=60)
        assert answer.json()["seed"] == 1
        # Jobs need a folder that all machines share.
        assert httpx.get(f"{url}/jobs", timeout=60).status_code == 503
    finally:
        process.terminate()
        process.wait(60)


@pytest.mark.parametrize(
    ("options", "settings", "message"),
    [
        (["--replicas", "0"], {}, "error: --replicas: expected at least 1, got 0"),
        (
            ["--max-replicas", "1"],
            {},
            "error: --max-replicas: expected at least --replicas, 2, got 1",
        ),
        (
            ["--ray", "127.0.0.1:1", "--port", "1"],
            KEYS,
            "error: DUBITO_API_KEYS: expected DUBITO_KEYS_FILE",
        ),
        ([], {"DUBITO_KEYS_FILE": "/nowhere"}, "error: DUBITO_KEYS_FILE: expected"),
        ([], {"DUBITO_WORKERS": "2"}, "error: args.workers: expected 1"),
    ],
)
def test_invalid_options_print_one_line(digits_store, tmp_path, options, settings, message):
    with (
        pytest.raises(AssertionError) as output,
        cluster(digits_store, tmp_path, options, **settings),
    ):
        pass
    log = (tmp_path / "cluster.log").read_text()
    assert log.startswith(message) and log.count("\n") == 1, output
    assert "secret-of-all-the-nodes" not in log


def test_private_ray_names_used_by_service_exist():
    code = (
        "import inspect, ray; from integrations.ray.app import uses_haproxy; "
        "uses_haproxy(); from ray.serve._private import replica; replica.add_port_to_grpc_server; "
        "assert '_node_ip_address' in inspect.getsource(ray.init), ray.__version__"
    )
    subprocess.run([PYTHON, "-c", code], cwd=ROOT, check=True)
