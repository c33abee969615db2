"""Test exported models in MLflow. Requires `make test-real`."""

import json
import os
import signal
import subprocess
from contextlib import contextmanager, suppress

import httpx
import numpy as np
import pandas as pd
import pytest

from dubito import Client
from integrations.mlflow.pyfunc import export
from model_store.artifacts.store import ModelStore
from tests.support.environment import ROOT, environment_with
from tests.support.ports import free_port
from tests.support.serving import serving, wait_until

BIN = ROOT / ".venv-mlflow" / "bin"
pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not BIN.exists(), reason="MLflow is not installed: make test-real"),
]
TABLE = pd.DataFrame({"age": [31.0, np.nan], "city": pd.Series(["Rome", None], dtype=object)})
ROWS = {
    "people": TABLE,
    "rents": TABLE.assign(other=1),
    "texts": pd.DataFrame({"text": ["good film", "bad day"]}),
    "digits": pd.DataFrame(np.arange(128).reshape(2, 64) % 17),
}
LOAD_SCRIPT = """
import json, sys
import mlflow, pandas
for name in sys.argv[1:]:
    model = mlflow.pyfunc.load_model(name)
    predictions = model.predict(pandas.read_pickle(f"{name}.rows"), params={"seed": 7})
    predictions.to_pickle(f"{name}.predictions")
assert not {"torch", "training", "service"} & {*sys.modules}
"""


@pytest.fixture(scope="module")
def folder(kinds, tmp_path_factory):
    folder = tmp_path_factory.mktemp("mlflow")
    for name in ROWS:
        export(ModelStore(kinds), name, "1", folder / name)
    return folder


@pytest.fixture(scope="module")
def expected(kinds):
    with serving(kinds) as (url, _), Client(url) as client:
        request = {"people": TABLE, "rents": TABLE, "texts": [*ROWS["texts"].text]}
        request["digits"] = ROWS["digits"].to_numpy()
        return {
            name: client.predict(rows, model=name, seed=7).to_pandas()
            for name, rows in request.items()
        }


def assert_same(actual, expected):
    common = [name for name in expected if name in actual]
    assert len(common) > 20
    assert {*actual} - {*common} == {"seed"}
    pd.testing.assert_frame_equal(
        actual[common], expected[common], check_exact=True, check_dtype=False
    )


def test_mlflow_model_predicts_the_same_as_service(folder, expected):
    for name, rows in ROWS.items():
        rows.to_pickle(folder / f"{name}.rows")
    completed = subprocess.run(
        [BIN / "python", "-c", LOAD_SCRIPT, *ROWS],
        cwd=folder,
        env=environment_with(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert completed.returncode == 0, completed.stderr[-4000:]
    for name in ROWS:
        assert_same(pd.read_pickle(folder / f"{name}.predictions"), expected[name])


@contextmanager
def serve_model(model):
    port = free_port()
    command = ["models", "serve", "-m", model, "--env-manager", "local", "-p", str(port)]
    environment = environment_with(PATH=f"{BIN}:/usr/bin:/bin")
    url = f"http://127.0.0.1:{port}"

    def is_ready():
        with suppress(httpx.TransportError):
            return httpx.get(f"{url}/ping").status_code == 200
        return False

    with subprocess.Popen(
        [BIN / "mlflow", *command], env=environment, cwd=model.parent, start_new_session=True
    ) as server:
        try:
            wait_until(is_ready, 60)
            yield url
        finally:
            os.killpg(server.pid, signal.SIGTERM)


def test_mlflow_server_predicts_the_same_as_service(folder, expected):
    with serve_model(folder / "people") as url:
        records = json.loads(TABLE.to_json(orient="records"))
        request = {"dataframe_records": records, "params": {"seed": 7}}
        answer = httpx.post(f"{url}/invocations", json=request, timeout=60)
    assert_same(pd.DataFrame(answer.json()["predictions"]), expected["people"])
