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

from tests.support.clusters import PYTHON, QUIET, Load, cluster, due_answers, nodes, replicas, tell
from tests.support.environment import ROOT, environment_with
from tests.support.ports import free_port
from tests.support.serving import answers, metric, serving, wait_until
from tests.support.stores import publish_again

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not PYTHON.exists(), reason="Ray is not installed"),
]

KEYS = {"DUBITO_API_KEYS": "secret-of-all-the-nodes"}
ADMIN = {"X-API-Key": "the-key-of-the-administrator"}
ROWS = 40
DIGITS = {"model": "digits", "version": "1"}


def workers(url, **labels):
    name = labels.pop("name", "dubito_ready")
    page = httpx.get(f"{url}/metrics", headers=ADMIN, timeout=60).text
    actual = {
        line.split('worker="')[1].split('"')[0]
        for line in page.splitlines()
        if line.startswith(f"{name}{{")
    }
    return {worker: metric(page, name, worker=worker, **labels) for worker in actual}


def test_replicas_are_one_service(own_store, digits_store, digits_rows, tmp_path):
    rows = digits_rows[:ROWS]
    settings = {"DUBITO_ADMIN_KEY": ADMIN["X-API-Key"], "DUBITO_POLL_INTERVAL_S": "1"}
    pool = {"pool": digits_rows[:100].tolist(), "k": 10, "seed": 5, "acquisition": "batchbald"}
    refused = [
        {"inputs": [[1.0] * 63]},
        {"inputs": []},
        {"inputs": [[0.0] * 64], "model": "x"},
        {"inputs": [["a"] * 64]},
    ]
    with serving(own_store.root, **settings) as (url, _):
        due = due_answers(url, rows)
        due_ranking = httpx.post(f"{url}/acquire", json=pool, timeout=60).content
        due_refusals = [
            httpx.post(f"{url}/predict", json=request, timeout=60) for request in refused
        ]
    with (
        cluster(own_store.root, tmp_path, **settings) as (url, log),
        httpx.Client(timeout=60) as client,
    ):
        wait_until(lambda: len(workers(url)) == 2)
        for request, answer in due * 3:
            assert httpx.post(f"{url}/predict", json=request, timeout=60).content == answer
        for _ in range(4):
            assert httpx.post(f"{url}/acquire", json=pool, timeout=60).content == due_ranking
        for request, answer in zip(refused, due_refusals, strict=True):
            came = client.post(f"{url}/predict", json=request)
            assert (came.status_code, came.content) == (answer.status_code, answer.content)

        # each replica has its own drift test and counters, and a reset reaches all
        for start in range(0, 160, 4):
            httpx.post(
                f"{url}/predict",
                json={"inputs": digits_rows[start : start + 4].tolist()},
                timeout=60,
            )
        counts = {"name": "dubito_flag_p_value_count", **DIGITS}
        wait_until(lambda: sum(workers(url, **counts).values()) == 160)
        wait_until(lambda: min(workers(url, **counts).values()) > 0)
        answer = client.post(f"{url}/admin/models/digits/versions/1/drift/reset", headers=ADMIN)
        assert answer.json()["reset"]
        wait_until(lambda: sum(workers(url, **counts).values()) == 0)

        # nobody joins Ray without its token
        join = [str(PYTHON), "-c", "import ray; ray.init(address='auto', log_to_driver=False)"]
        environment = {**environment_with(), **QUIET, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
        refusal = subprocess.run(
            join, env=environment, capture_output=True, text=True, timeout=60, check=False
        )
        assert (
            refusal.returncode == 1
            and "Authentication token is missing or incorrect" in refusal.stderr
        )

        # the other replica sees a new version when it polls the store
        publish_again(own_store, digits_store)
        assert (
            client.post(f"{url}/admin/refresh", headers=ADMIN).json()["models"]["digits"]["serving"]
            == "2"
        )
        loaded = {"name": "dubito_loaded_version", "model": "digits", "version": "2"}
        wait_until(lambda: list(workers(url, **loaded).values()) == [1.0, 1.0])

        # a job, on the state folder that all share on this machine
        job = client.post(
            f"{url}/predict/jobs", json={"inputs": rows.tolist(), "seed": 3, "version": "1"}
        ).json()
        wait_until(lambda: client.get(f"{url}/jobs/{job['id']}").json()["state"] == "done", 60)
        message = log.read_text()
    assert "Traceback" not in message and ADMIN["X-API-Key"] not in message
    wait_until(lambda: replicas() == [])


def listening():
    tables = [Path(f"/proc/net/{name}").read_text() for name in ("tcp", "tcp6")]
    lines = [line for table in tables for line in table.splitlines()]
    return {line.split()[1] for line in lines if line.split()[3] == "0A"}


@pytest.mark.parametrize("options", [[], ["--by-model"]], ids=["HAProxy", "Ray's proxy"])
def test_everything_of_a_cluster_here_listens_on_loopback(digits_store, tmp_path, options):
    before = listening()
    with cluster(digits_store, tmp_path, options) as (url, _):
        assert answers(f"{url}/models")
        opened = listening() - before
    assert f"{int(url.rpartition(':')[2]):04X}" in {place.rpartition(":")[2] for place in opened}
    assert len(opened) > 5
    loopback = (
        "0100007F:",
        "00000000000000000000000001000000:",
        "0000000000000000FFFF00000100007F:",
    )
    assert [place for place in opened if not place.startswith(loopback)] == []


@pytest.mark.parametrize("options", [[], ["--by-model"]], ids=["HAProxy", "Ray's proxy"])
def test_what_a_replica_cannot_take_is_refused_with_429_and_when_to_come_again(
    digits_store, tmp_path, options
):
    settings = {"DUBITO_MEMORY_BUDGET_BYTES": str(6 << 20)}
    with cluster(digits_store, tmp_path, options, **settings) as (url, _):
        with Load(url, {"1": [({"inputs": [[0.0] * 64] * 500}, b"")]}, threads=12) as load:
            wait_until(lambda: load.said["429"] > 20 and load.said["200"] > 5)
        assert set(load.said) <= {"200", "429"}, load.refusals
        assert load.retry_after >= {"1"}


def test_a_node_and_a_replica_that_are_lost_cost_no_wrong_answer(
    own_store, digits_store, digits_rows, tmp_path
):
    with serving(own_store.root) as (url, _):
        due = {"1": due_answers(url, digits_rows[:ROWS])}
        publish_again(own_store, digits_store)
        wait_until(lambda: httpx.get(f"{url}/models/digits").json()["serving"] == "2")
        due["2"] = due_answers(url, digits_rows[:ROWS])
    own_store.set_alias("digits", "latest", "1")
    recovery = {}
    options = ["--replicas", "2", "--one-proxy"]
    with nodes(0, 2, 2) as (address, process):
        settings = {
            "DUBITO_THREADS": "1",
            "DUBITO_POLL_INTERVAL_S": "0.2",
            "RAY_SERVE_ENABLE_HA_PROXY": "0",
        }
        with cluster(own_store.root, tmp_path, [*options, "--ray", address], **settings) as (
            url,
            log,
        ):
            wait_until(lambda: len(replicas()) == 2, 60)
            with Load(url, due) as load:
                load.wait_for(50)
                own_store.set_alias("digits", "latest", "2")
                since = time.monotonic()
                wait_until(lambda: load.good and load.good[-1][1] == "2", 30)
                load.wait_for(100)
                assert {version for _, version in load.good[-50:]} == {"2"}
                assert set(load.said) == {"200"}, load.refusals
                recovery["new version"] = load.longest_pause_s(since)

                since, before = time.monotonic(), set(replicas())
                hung = min(before)
                os.kill(hung, signal.SIGSTOP)
                wait_until(
                    lambda: set(replicas()) - before, 120
                )  # another in its place, on the processors left
                load.wait_for(100)
                recovery["hung replica"] = load.longest_pause_s(since)
                os.kill(hung, signal.SIGKILL)

                since = time.monotonic()
                tell(process, "kill 2")
                load.wait_for(100)
                recovery["lost node"] = load.longest_pause_s(since)
                tell(process, "add 2")
                wait_until(lambda: len(replicas()) == 2, 120)
                load.wait_for(100)
            assert load.wrong == []
            print(recovery, dict(load.said))
            assert max(recovery.values()) < 30
            assert "Traceback" not in log.read_text()


def test_requests_that_name_a_model_go_where_it_is_in_memory(own_store, digits_store, tmp_path):
    publish_again(own_store, digits_store, name="other")
    with serving(own_store.root) as (url, _):
        (size,) = next(
            m for m in httpx.get(f"{url}/models").json()["models"] if m["name"] == "digits"
        )["in_memory"].values()
    with cluster(
        own_store.root, tmp_path, ["--by-model"], DUBITO_MAX_MODEL_BYTES=str(size * 3 // 2)
    ) as (url, _):

        def ask(model, times):
            headers = {"serve_multiplexed_model_id": model}
            request = {"inputs": [[0.0] * 64], "model": model, "seed": 1}
            for _ in range(times):
                assert (
                    httpx.post(
                        f"{url}/predict", json=request, headers=headers, timeout=60
                    ).status_code
                    == 200
                )

        def answered():
            time.sleep(6)  # until all have shown their metrics
            return workers(url, name="dubito_requests_total", route="/predict", status="200")

        wait_until(lambda: len(workers(url)) == 2)
        ask("digits", 1)  # one replica loads it, in the place of the other model
        before = answered()
        ask("digits", 10)
        between = answered()
        ask("other", 10)
        after = answered()
        of_digits = {worker: between[worker] - before[worker] for worker in before}
        of_other = {worker: after[worker] - between[worker] for worker in before}
        assert sorted(of_digits.values()) == sorted(of_other.values()) == [0, 10]
        assert of_digits != of_other


def test_more_replicas_come_with_more_work(digits_store, digits_rows, tmp_path):
    request = {"inputs": [list(map(float, row)) for row in digits_rows] * 4}
    with cluster(
        digits_store, tmp_path, ["--replicas", "1", "--most", "2"], DUBITO_THREADS="1"
    ) as (url, _):
        assert len(replicas()) == 1
        with Load(url, {"1": [(request, b"")]}, threads=8):
            wait_until(lambda: len(replicas()) == 2, 300)


def test_the_guide_s_configuration_file_serves(digits_store, tmp_path):
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
        wait_until(lambda: process.poll() is not None or answers(f"{url}/models"), 300)
        answer = httpx.post(f"{url}/predict", json={"inputs": [[0.0] * 64], "seed": 1}, timeout=60)
        assert answer.json()["seed"] == 1
        assert (
            httpx.get(f"{url}/jobs", timeout=60).status_code == 503
        )  # no folder that all machines have
    finally:
        process.terminate()
        process.wait(60)


@pytest.mark.parametrize(
    ("options", "settings", "said"),
    [
        (["--replicas", "0"], {}, "error: --replicas: expected at least 1, got 0"),
        (["--most", "1"], {}, "error: --most: expected at least --replicas, 2, got 1"),
        (
            ["--ray", "127.0.0.1:1", "--port", "1"],
            KEYS,
            "error: DUBITO_API_KEYS: expected DUBITO_KEYS_FILE",
        ),
        ([], {"DUBITO_KEYS_FILE": "/nowhere"}, "error: DUBITO_KEYS_FILE: expected"),
        ([], {"DUBITO_WORKERS": "2"}, "error: args.workers: expected 1"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(digits_store, tmp_path, options, settings, said):
    with (
        pytest.raises(AssertionError) as output,
        cluster(digits_store, tmp_path, options, **settings),
    ):
        pass
    log = (tmp_path / "cluster.log").read_text()
    assert log.startswith(said) and log.count("\n") == 1, output
    assert "secret-of-all-the-nodes" not in log


def test_the_private_names_of_ray_that_the_service_uses_are_there():
    code = (
        "import inspect, ray; from integrations.ray.app import uses_haproxy; "
        "uses_haproxy(); from ray.serve._private import replica; replica.add_port_to_grpc_server; "
        "assert '_node_ip_address' in inspect.getsource(ray.init), ray.__version__"
    )
    subprocess.run([PYTHON, "-c", code], cwd=ROOT, check=True)
