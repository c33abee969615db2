import io

import numpy as np
import pandas
import pytest

from dubito import Client, InvalidInput
from tests.support.files import npy_bytes, npz_bytes
from tests.support.serving import open_client, wait_until

PERSON = {"age": 31, "city": "Rome"}
ROWS = np.array([[(31 - 50) / 20, 1.0, 0.0]], dtype=np.float32)  # the same, as the network gets it
PEOPLE = {"model": "people", "seed": 3}
NPY, NPZ = "application/x-npy", "application/x-npz"


@pytest.fixture(scope="module")
def client(kinds, tmp_path_factory):
    pools = tmp_path_factory.mktemp("pools")
    np.save(pools / "rows.npy", ROWS)
    settings = {"DUBITO_POOLS": str(pools), "DUBITO_DEFAULT_MODEL": "people"}
    with open_client(kinds, **settings) as client:
        yield client


def in_json(path, field, **more):
    return lambda client: client.post(path, json={**PEOPLE, field: ROWS.tolist(), **more})


def named(path, field):
    return lambda client: client.post(path, json={**PEOPLE, field: "rows.npy"})


def in_file(path, content, media_type):
    return lambda client: client.post(
        path, params={"model": "people"}, content=content, headers={"Content-Type": media_type}
    )


def label(client):
    entry = {"id": "one", "label": "class 1", "input": ROWS[0].tolist()}
    return client.post("/labels", json={"model": "people", "labels": [entry]})


def infer(client):
    tensor = {"name": "x", "shape": [1, 3], "datatype": "FP32", "data": ROWS.ravel().tolist()}
    return client.post("/v2/models/people/infer", json={"inputs": [tensor]})


def invoke(client):
    return client.post("/invocations", json={"instances": ROWS.tolist()})


DOORS = {
    "predict": in_json("/predict", "inputs"),
    "predict npy": in_file("/predict", npy_bytes(ROWS), NPY),
    "acquire": in_json("/acquire", "pool", k=1),
    "acquire npy": in_file("/acquire", npy_bytes(ROWS), NPY),
    "acquire npz": in_file("/acquire", npz_bytes(x=ROWS), NPZ),
    "acquire pool_file": named("/acquire", "pool_file"),
    "acquire preview": in_file("/acquire/preview", npy_bytes(ROWS), NPY),
    "predict job": in_json("/predict/jobs", "inputs"),
    "predict job npz": in_file("/predict/jobs", npz_bytes(x=ROWS), NPZ),
    "predict job inputs_file": named("/predict/jobs", "inputs_file"),
    "acquire job": in_json("/acquire/jobs", "pool"),
    "labels": label,
    "infer": infer,
    "invocations": invoke,
}


@pytest.mark.parametrize("door", DOORS)
def test_rows_of_numbers_are_refused_for_a_table(client, door):
    refused = DOORS[door](client)
    assert 400 <= refused.status_code < 500, refused.text
    assert "by column" in refused.text or "for each of the 2 columns" in refused.text


def test_a_job_reads_its_rows_as_they_came(client):
    job = client.post("/predict/jobs", json={**PEOPLE, "inputs": [PERSON]}).json()
    wait_until(
        lambda: client.get(f"/jobs/{job['id']}").json()["state"] not in ("queued", "running")
    )
    assert client.get(f"/jobs/{job['id']}").json()["error"] is None
    arrays = np.load(io.BytesIO(client.get(f"/jobs/{job['id']}/result").content))
    at_once = client.post("/predict", json={**PEOPLE, "inputs": [PERSON]}).json()["predictions"]
    assert arrays["probabilities"][0].tolist() == at_once[0]["probabilities"]


def test_the_client_sends_frames_by_column(client):
    with Client(str(client.base_url)) as dubito:
        assert len(dubito.predict(pandas.DataFrame([PERSON]), **PEOPLE)) == 1
        with pytest.raises(InvalidInput, match="inputs: expected rows as objects keyed by column"):
            dubito.predict(ROWS, **PEOPLE)
