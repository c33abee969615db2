"""Test the clients of Triton, KServe, MLServer and MLflow. Requires `make test-real`."""

import base64
import json
import re
import subprocess
from urllib.parse import urlsplit

import httpx
import numpy as np
import pytest
from PIL import Image

from tests.support.environment import ROOT
from tests.support.serving import serving

pytestmark = pytest.mark.real
CLIENTS = {
    "triton": "tritonclient",
    "kserve_client": "kserve",
    "mlserver_client": "mlserver",
    "mlflow_client": "mlflow",
}
# The model whose /predict response each client case must match.
DIGITS = (
    "digits",
    "digits_json",
    "digits_gzip",
    "digits_deflate",
    "digits_version",
    "digits_half",
    "digits_binary",
)
CASES = {
    **dict.fromkeys((*DIGITS, "digits_input", "digits_list", "digits_frame"), "digits"),
    **dict.fromkeys(("pictures", "pictures_array"), "pictures"),
    **dict.fromkeys(("texts", "texts_json"), "texts"),
    "people": "people",
    "rents": "rents",
}
TABLE = [{"age": 31.0, "city": "Rome"}, {"age": None, "city": None}]


@pytest.fixture(scope="module")
def url(kinds):
    with serving(kinds, DUBITO_DEFAULT_MODEL="digits") as (url, _):
        yield url


@pytest.fixture(scope="module")
def folder(tmp_path_factory, digits_rows):
    folder = tmp_path_factory.mktemp("clients")
    np.save(folder / "digits.npy", digits_rows[:5])
    Image.new("RGB", (1, 1), (128, 128, 128)).save(folder / "picture.png")
    return folder


@pytest.fixture(scope="module")
def expected(url, folder):
    picture = base64.b64encode((folder / "picture.png").read_bytes()).decode()
    rows = {
        "digits": np.load(folder / "digits.npy").tolist(),
        "pictures": [picture] * 2,
        "texts": ["good film", "bad day"],
        "people": TABLE,
        "rents": TABLE,
    }
    requests = {kind: {"model": kind, "inputs": inputs, "seed": 7} for kind, inputs in rows.items()}
    answers = {
        kind: httpx.post(f"{url}/predict", json=request) for kind, request in requests.items()
    }
    assert {answer.status_code for answer in answers.values()} == {200}
    return {kind: answer.json()["predictions"] for kind, answer in answers.items()}


def run_client(client, url, folder):
    python = ROOT / f".venv-{CLIENTS[client]}" / "bin" / "python"
    if not python.exists():
        pytest.skip(f"{CLIENTS[client]} is not installed: make test-real")
    parts = urlsplit(url)
    address = {"triton": [parts.netloc], "mlflow_client": [parts.hostname, str(parts.port)]}.get(
        client, [url]
    )
    command = [
        str(python),
        str(ROOT / "tests" / "real" / "clients" / f"{client}.py"),
        *address,
        str(folder),
    ]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert completed.returncode == 0, completed.stderr[-4000:]
    return json.loads(completed.stdout)


def test_examples_in_guide_run(url):
    guide = (ROOT / "docs" / "open-inference.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    parts = urlsplit(url)
    assert blocks
    for block in blocks:
        name = re.search(r"(?:import|from) (tritonclient|mlflow)", block)[1]
        python = ROOT / f".venv-{name}" / "bin" / "python"
        if python.exists():
            example = block.replace("127.0.0.1:8000", parts.netloc).replace(
                '"127.0.0.1", 8000', f'"{parts.hostname}", {parts.port}'
            )
            completed = subprocess.run(
                [python, "-c", example], capture_output=True, text=True, timeout=120
            )
            assert completed.returncode == 0, completed.stderr[-2000:]
            assert (
                "label" in completed.stdout or "['" in completed.stdout or "[b'" in completed.stdout
            ), completed.stdout


def flatten(rows, name):
    """Flatten a field of all predictions to a tensor."""
    return np.asarray([row[name] for row in rows]).ravel().tolist()


@pytest.mark.parametrize("client", CLIENTS)
def test_client_gets_same_answer_as_predict_for_every_input(client, url, folder, expected):
    answers = run_client(client, url, folder)
    compared = set()
    for case, kind in CASES.items():
        if case not in answers:
            continue
        compared.add(kind)
        rows, answer = expected[kind], answers[case]
        names = ("mean", "std", "interval") if kind == "rents" else ("probabilities", "label")
        for name in (*names, *(("p_value", "flag") if case != "digits_version" else ())):
            assert np.ravel(answer[name]).tolist() == flatten(rows, name), (case, name)
        if "parameters" in answer:
            assert answer["parameters"]["seed"] == 7
            assert answer["model_name"] == kind
            assert answer["id"]
    assert compared == set(expected)


def test_triton_client_reads_all_responses(url, folder, expected):
    answers = run_client("triton", url, folder)
    assert [answers[name] for name in ("live", "ready", "model_ready", "none_ready")] == [
        True,
        True,
        True,
        False,
    ]
    assert answers["server"]["extensions"][0] == "binary_tensor_data"
    assert answers["model"]["inputs"] == [
        {"name": "inputs", "datatype": "FP32", "shape": [-1, 8, 8]}
    ]
    assert [column["datatype"] for column in answers["table_model"]["inputs"]] == ["FP64", "BYTES"]
    assert answers["config"]["input"] == [
        {"name": "inputs", "data_type": "TYPE_FP32", "dims": [8, 8]}
    ]
    assert {(entry["name"], entry["state"]) for entry in answers["index"]} >= {
        ("digits", "READY"),
        ("rents", "READY"),
    }
    assert answers["digits"]["id"] == "a request"
    assert "probabilities" in answers["digits"]["binary"], (
        "clients request binary data if they name no outputs"
    )
    requested = answers["digits_version"]
    assert requested["binary"] == ["label", "samples"], "an output's flag overrides the request's"
    assert len(requested["samples"]) == 5 * requested["parameters"]["num_samples"] * 10
    assert answers["unknown_model"] == ["404", answers["unknown_model"][1]]
    assert "expected one of" in answers["unknown_model"][1]
    assert answers["wrong_shape"][0] == answers["wrong_parameter"][0] == "400"
    assert answers["wrong_shape"][1].startswith(
        "inputs: expected an array of shape (N, 8, 8) or (N, 64)"
    )
    assert answers["wrong_parameter"][1].startswith("parameters.fpr: expected")
    assert answers["too_late"][0] == "504"


def test_kserve_client_reads_all_responses(url, folder):
    answers = run_client("kserve_client", url, folder)
    assert [answers[name] for name in ("live", "ready", "model_ready", "none_ready")] == [
        True,
        True,
        True,
        False,
    ]
    assert answers["digits"]["id"] == "a request"
    assert answers["graph"] == ["step", 5]
    assert answers["unknown_model"][0] == 404
    assert answers["unknown_model"][1].startswith("model: expected one of"), (
        "the client must receive the service's message"
    )
    assert answers["wrong_shape"][0] == 400


def test_mlserver_and_mlflow_clients_read_errors(url, folder):
    answers = run_client("mlserver_client", url, folder)
    assert answers["unknown_model"][0] == 404
    assert answers["wrong_shape"][1].startswith("inputs: expected an array of shape")
    answers = run_client("mlflow_client", url, folder)
    assert answers["version"]
    assert len(answers["people_json"]["label"]) == 1
    assert "RESOURCE_DOES_NOT_EXIST" in answers["unknown_model"]
    assert "BAD_REQUEST" in answers["wrong_shape"]
