import io

import numpy as np
import pandas
import pytest

from dubito import Client, InvalidInput
from tests.support.files import npy_bytes, npz_bytes
from tests.support.serving import open_client, wait_until

PERSON = {"age": 31, "city": "Rome"}
ROWS = np.array([[(31 - 50) / 20, 1.0, 0.0]], dtype=np.float32)  # PERSON as network input
PEOPLE = {"model": "people", "seed": 3}
NPY, NPZ = "application/x-npy", "application/x-npz"


@pytest.fixture(scope="module")
def client(kinds, tmp_path_factory):
    pools = tmp_path_factory.mktemp("pools")
    np.save(pools / "rows.npy", ROWS)
    settings = {"DUBITO_POOLS": str(pools), "DUBITO_DEFAULT_MODEL": "people"}
    with open_client(kinds, **settings) as client:
        yield client


def json_request(path, field, **options):
    return lambda client: client.post(path, json={**PEOPLE, field: ROWS.tolist(), **options})


def file_name_request(path, field):
    return lambda client: client.post(path, json={**PEOPLE, field: "rows.npy"})


def file_request(path, content, media_type):
    return lambda client: client.post(
        path, params={"model": "people"}, content=content, headers={"Content-Type": media_type}
    )


def label_request(client):
    entry = {"id": "one", "label": "class 1", "input": ROWS[0].tolist()}
    return client.post("/labels", json={"model": "people", "labels": [entry]})


def infer_request(client):
    tensor = {"name": "x", "shape": [1, 3], "datatype": "FP32", "data": ROWS.ravel().tolist()}
    return client.post("/v2/models/people/infer", json={"inputs": [tensor]})


def invocations_request(client):
    return client.post("/invocations", json={"instances": ROWS.tolist()})


REQUESTS = {
    "predict": json_request("/predict", "inputs"),
    "predict npy": file_request("/predict", npy_bytes(ROWS), NPY),
    "acquire": json_request("/acquire", "pool", k=1),
    "acquire npy": file_request("/acquire", npy_bytes(ROWS), NPY),
    "acquire npz": file_request("/acquire", npz_bytes(x=ROWS), NPZ),
    "acquire pool_file": file_name_request("/acquire", "pool_file"),
    "acquire preview": file_request("/acquire/preview", npy_bytes(ROWS), NPY),
    "predict job": json_request("/predict/jobs", "inputs"),
    "predict job npz": file_request("/predict/jobs", npz_bytes(x=ROWS), NPZ),
    "predict job inputs_file": file_name_request("/predict/jobs", "inputs_file"),
    "acquire job": json_request("/acquire/jobs", "pool"),
    "labels": label_request,
    "infer": infer_request,
    "invocations": invocations_request,
}


@pytest.mark.parametrize("name", REQUESTS)
def test_table_model_refuses_rows_without_column_names(client, name):
    response = REQUESTS[name](client)
    assert 400 <= response.status_code < 500, response.text
    assert "by column" in response.text or "for each of the 2 columns" in response.text


def test_job_accepts_rows_keyed_by_column(client):
    job = client.post("/predict/jobs", json={**PEOPLE, "inputs": [PERSON]}).json()
    wait_until(
        lambda: client.get(f"/jobs/{job['id']}").json()["state"] not in ("queued", "running")
    )
    assert client.get(f"/jobs/{job['id']}").json()["error"] is None
    arrays = np.load(io.BytesIO(client.get(f"/jobs/{job['id']}/result").content))
    expected = client.post("/predict", json={**PEOPLE, "inputs": [PERSON]}).json()["predictions"]
    assert arrays["probabilities"][0].tolist() == expected[0]["probabilities"]


def test_client_sends_data_frames_by_column(client):
    with Client(str(client.base_url)) as dubito:
        assert len(dubito.predict(pandas.DataFrame([PERSON]), **PEOPLE)) == 1
        with pytest.raises(InvalidInput, match="inputs: expected rows as objects keyed by column"):
            dubito.predict(ROWS, **PEOPLE)
