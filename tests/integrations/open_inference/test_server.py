import json
import shutil

import numpy as np
import pytest

from tests.support.open_inference import (
    OPTIONAL_OUTPUTS,
    ROW,
    get_arrays,
    get_error,
    infer,
    post,
    string_tensor,
    tensor,
)
from tests.support.serving import metric, open_client


def test_health_and_server_metadata_follow_protocol(client):
    for path, expected in (("live", {"live": True}), ("ready", {"ready": True})):
        answer = client.get(f"/v2/health/{path}")
        assert (answer.status_code, answer.json()) == (200, expected)
    assert client.get("/v2").json()["extensions"] == [
        "binary_tensor_data",
        "parameters",
        "model_repository",
    ]
    assert client.get("/v2/models").json() == {
        "models": ["digits", "groups", "people", "pictures", "rents", "texts"]
    }


def test_server_without_models_is_live_but_not_ready(tmp_path):
    with open_client(tmp_path / "none") as client:
        assert client.get("/v2/health/live").json() == {"live": True}
        assert get_error(client.get("/v2/health/ready"), 503).startswith("no model is published")
        assert get_error(client.post("/v2/models/digits/infer", json={"inputs": [ROW]}), 503)
        assert client.post("/v2/repository/index").json() == []


def test_broken_version_is_not_ready(kinds, tmp_path):
    shutil.copytree(kinds / "people", tmp_path / "models" / "people")
    shutil.copytree(kinds / "people" / "1", tmp_path / "models" / "people" / "2")
    with open_client(tmp_path / "models") as client:
        assert client.get("/v2/models/people/ready").status_code == 200
        cells = [tensor(np.array([31.0]), "age"), string_tensor(["Rome"], "city")]
        content = json.dumps({"inputs": cells})
        assert get_error(client.post("/v2/models/people/versions/2/infer", content=content), 503)
        assert get_error(client.get("/v2/models/people/versions/2/ready"), 503)
        index = {entry["version"]: entry for entry in client.post("/v2/repository/index").json()}
        assert (index["1"]["state"], index["2"]["state"]) == ("READY", "UNAVAILABLE")
        assert index["2"]["reason"]
        ready = client.post("/v2/repository/index", json={"ready": True}).json()
        assert [entry["version"] for entry in ready] == ["1"]


@pytest.mark.parametrize("model", ["digits", "people", "pictures", "rents", "texts", "groups"])
def test_metadata_describes_inputs_and_outputs(client, model, digits_rows):
    metadata = client.get(f"/v2/models/{model}").json()
    values = {"FP32": 0.0, "FP64": 30.0, "INT32": 1, "BYTES": "Rome"}
    inputs = []
    for described in metadata["inputs"]:
        shape = [2 if length == -1 else length for length in described["shape"]]
        assert described["shape"][0] == -1
        data = [values[described["datatype"]]] * int(np.prod(shape))
        names = {name: described[name] for name in ("name", "datatype")}
        inputs.append({**names, "shape": shape, "data": data})
    described = {
        output["name"]: (output["datatype"], output["shape"]) for output in metadata["outputs"]
    }
    for outputs in ([], [{"name": name} for name in described if name != "abstain"]):
        answer = infer(client, inputs, model, outputs=outputs)
        for output in answer["outputs"]:
            datatype, shape = described[output["name"]]
            assert output["datatype"] == datatype
            assert len(shape) == len(output["shape"])
            assert all(
                expected in (-1, length)
                for expected, length in zip(shape, output["shape"], strict=True)
            )
    default_outputs = {output["name"] for output in infer(client, inputs, model)["outputs"]}
    optional_outputs = {name for name in described if name.partition(".")[0] in OPTIONAL_OUTPUTS}
    assert default_outputs == set(described) - optional_outputs
    config = client.get(f"/v2/models/{model}/config").json()
    assert [item["name"] for item in config["input"]] == [
        item["name"] for item in metadata["inputs"]
    ]
    assert all(
        item["data_type"].startswith("TYPE_") for item in [*config["input"], *config["output"]]
    )


def test_requests_count_in_metrics_and_drift(kinds, digits_rows):
    with open_client(kinds) as client:
        answer = post(client, {"inputs": [tensor(digits_rows[:5])]})
        text = client.get("/metrics").text
        labels = {"model": "digits", "version": "1"}
        assert metric(text, "dubito_rows_total", **labels) == 5
        flags = sum(get_arrays(answer.json())["flag"].tolist())
        assert metric(text, "dubito_flags_total", **labels) == flags
        route = "/v2/models/{name}/infer"
        assert metric(text, "dubito_requests_total", route=route, status="200") == 1
        assert client.get("/models/digits").json()["drift"]["rows"] == 5


def test_authentication_errors_follow_protocol(kinds, tmp_path):
    key = "the-key-of-the-reader"
    (tmp_path / "keys.toml").write_text(
        f'[[keys]]\nname = "reader"\nkey = "{key}"\nscopes = ["read"]\n'
    )
    with open_client(kinds, DUBITO_KEYS_FILE=str(tmp_path / "keys.toml")) as client:
        bearer = {"Authorization": f"Bearer {key}"}
        for path in ("live", "ready"):
            assert client.get(f"/v2/health/{path}").status_code == 200
        for method, path in (
            ("GET", "/v2"),
            ("GET", "/v2/models"),
            ("POST", "/v2/repository/index"),
        ):
            error = get_error(client.request(method, path), 401)
            assert error.startswith("key: expected a valid key")
            assert client.request(method, path, headers=bearer).status_code == 200
        for path in ("/v2/models/digits/infer", "/v2/models/digits/versions/1/infer"):
            error = get_error(client.post(path, json={"inputs": [ROW]}, headers=bearer), 403)
            assert error.startswith("key: expected a key with the scope predict")
