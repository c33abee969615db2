"""Test rules and alerts in Prometheus. Requires Debian's package `prometheus`."""

import copy
import shutil
import subprocess
import time
from contextlib import contextmanager

import httpx
import numpy as np
import pytest
import yaml

from tests.support.environment import ROOT
from tests.support.ports import free_port
from tests.support.serving import is_responding, serving, wait_until
from tests.test_monitoring import DASHBOARD, PANELS, PROMETHEUS

FOLDER = ROOT / "docker" / "monitoring" / "prometheus"
KEY = "the-key-of-prometheus-itself"
ABSENT = [name for name in ("prometheus", "promtool") if shutil.which(name) is None]
EMPTY_PANELS = {"Mean standard deviation"}  # needs a regression model

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(bool(ABSENT), reason=f"not installed: {', '.join(ABSENT)}"),
]


@pytest.mark.parametrize(
    "command",
    [
        ("check", "config", "--syntax-only", "prometheus.yml"),
        ("check", "rules", "rules.yml"),
        ("test", "rules", "rules_test.yml"),
    ],
    ids=" ".join,
)
def test_promtool_accepts_config_and_rules(command):
    completed = subprocess.run(
        ["promtool", *command], cwd=FOLDER, capture_output=True, text=True, timeout=600
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert "SUCCESS" in completed.stdout


@contextmanager
def prometheus(folder, urls):
    config = copy.deepcopy(PROMETHEUS)
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(FOLDER / name) for name in config["rule_files"]]
    (job,) = config.pop("scrape_configs")
    (folder / "key").write_text(KEY)
    keys = {"dubito": "/dev/null", "with-keys": str(folder / "key")}
    config["scrape_configs"] = [
        job
        | {"job_name": name, "authorization": {"credentials_file": keys[name]}}
        | {"static_configs": [{"targets": [url.removeprefix("http://")]}]}
        for name, url in urls.items()
    ]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{free_port()}"
    command = [
        "prometheus",
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
    ]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [*command, f"--web.listen-address={address}"], stdout=log, stderr=log
        )
    try:
        wait_until(
            lambda: process.poll() is not None or is_responding(f"http://{address}/-/ready"), 60
        )
        assert process.poll() is None, (folder / "log").read_text()[-2000:]
        with httpx.Client(base_url=f"http://{address}", timeout=30) as client:
            yield client
    finally:
        process.terminate()
        process.wait(30)


@pytest.fixture(scope="module")
def monitored_service(digits_store, tmp_path_factory):
    folder = tmp_path_factory.mktemp("prometheus")
    (folder / "keys.toml").write_text(
        f'[[keys]]\nname = "prometheus"\nkey = "{KEY}"\nscopes = ["metrics"]\n'
    )
    with (
        serving(digits_store) as (url, _),
        serving(digits_store, DUBITO_KEYS_FILE=str(folder / "keys.toml")) as (protected_url, _),
        httpx.Client(base_url=url, timeout=60) as service,
        prometheus(folder, {"dubito": url, "with-keys": protected_url}) as server,
    ):
        yield service, server


def query_prometheus(server, query):
    answer = server.get("/api/v1/query", params={"query": query})
    assert answer.status_code == 200, (query, answer.text)
    result = answer.json()["data"]["result"]
    return [({**sample["metric"]}, float(sample["value"][1])) for sample in result]


def get_firing_alerts(server):
    alerts = server.get("/api/v1/alerts").json()["data"]["alerts"]
    return {alert["labels"]["alertname"]: alert for alert in alerts if alert["state"] == "firing"}


def send(service, rows):
    for start in range(0, len(rows), 16):
        service.post(
            "/predict", json={"inputs": rows[start : start + 16].tolist()}
        ).raise_for_status()


def test_services_with_and_without_keys_are_scraped(monitored_service):
    _, server = monitored_service
    wait_until(
        lambda: (
            {labels["job"]: up for labels, up in query_prometheus(server, "up")}
            == {"dubito": 1, "with-keys": 1}
        )
    )


def test_drift_alert_fires_only_when_inputs_drift(monitored_service, digits_rows):
    service, server = monitored_service
    send(service, digits_rows)
    observed = 'dubito_flag_p_value_count{job="dubito"}'
    wait_until(
        lambda: any(rows >= len(digits_rows) - 1 for _, rows in query_prometheus(server, observed))
    )
    time.sleep(3)  # three evaluations of the rules
    assert query_prometheus(server, 'dubito_drift_alarm{job="dubito"}')[0][1] == 0
    assert "DubitoDrift" not in get_firing_alerts(server)
    send(service, np.random.default_rng().uniform(0, 16, (160, 64)))
    wait_until(lambda: "DubitoDrift" in get_firing_alerts(server))
    alert = get_firing_alerts(server)["DubitoDrift"]
    assert (alert["labels"]["model"], alert["labels"]["version"]) == ("digits", "1")
    assert alert["annotations"]["description"].startswith(
        "The inputs of model digits version 1 differ"
    )
    assert get_firing_alerts(server).keys() <= {"DubitoDrift"}


def test_every_dashboard_panel_has_data(monitored_service, digits_rows):
    service, server = monitored_service
    rows = digits_rows[:20]
    job = service.post("/predict/jobs", json={"inputs": rows.tolist()})
    job.raise_for_status()
    wait_until(lambda: service.get(f"/jobs/{job.json()['id']}").json()["state"] == "done", 120)
    pool = {
        "pool": rows.tolist(),
        "ids": [f"r{n}" for n in range(20)],
        "k": 10,
        "keep": True,
        "control": 0.2,
    }
    service.post("/acquire", json=pool).raise_for_status()
    label = {"id": "of a test", "label": "3", "input": rows[0].tolist()}
    service.post("/labels", json={"labels": [label]}).raise_for_status()
    service.post("/predict", json={})
    send(service, rows)

    def find_empty_panels():
        return {
            (panel["title"], target["refId"])
            for panel in PANELS
            for target in panel["targets"]
            if not query_prometheus(server, fill_variables(target["expr"]))
            and panel["title"] not in EMPTY_PANELS
        }

    send(service, digits_rows[:50])
    send(service, np.random.default_rng().uniform(0, 16, (160, 64)))
    end = time.monotonic() + 120
    while empty_panels := find_empty_panels():
        assert time.monotonic() < end, f"without data: {sorted(empty_panels)}"
        time.sleep(0.5)
    for annotation in DASHBOARD["annotations"]["list"][1:]:
        query_prometheus(server, fill_variables(annotation["expr"]))


def fill_variables(expression):
    for variable, value in (("$__rate_interval", "30s"), ("$job", ".*"), ("$model", ".*")):
        expression = expression.replace(variable, value)
    return expression
