import io
import json

import numpy as np
import pandas
import pytest

from dubito import Client, InvalidInput
from tests.support.files import npy_bytes, npz_bytes
from tests.support.serving import open_client, wait_until

PERSON = {"age": 31, "city": "Rome"}
ROWS = np.array([[(31 - 50) / 20, 1.0, 0.0]], dtype=np.float32)  # the same, encoded
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
    return lambda client, flag: client.post(
        path, json={**PEOPLE, field: ROWS.tolist(), **more, **flag}
    )


def named(path, field):
    return lambda client, flag: client.post(path, json={**PEOPLE, field: "rows.npy", **flag})


def in_file(path, content, media_type, **options):
    return lambda client, flag: client.post(
        path,
        params={"model": "people", **options} | {name: json.dumps(v) for name, v in flag.items()},
        content=content,
        headers={"Content-Type": media_type},
    )


def label(client, flag):
    entry = {"id": "one", "label": "class 1", "input": ROWS[0].tolist()}
    return client.post("/labels", json={"model": "people", "labels": [entry], **flag})


def infer(client, flag):
    tensor = {"name": "x", "shape": [1, 3], "datatype": "FP32", "data": ROWS.ravel().tolist()}
    return client.post("/v2/models/people/infer", json={"inputs": [tensor], "parameters": flag})


def invoke(client, flag):
    return client.post("/invocations", json={"instances": ROWS.tolist(), "params": flag})


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
def test_rows_of_numbers_are_refused_unless_they_are_said_to_be_encoded(client, door):
    refused, used = (DOORS[door](client, flag) for flag in ({}, {"encoded": True}))
    assert 400 <= refused.status_code < 500, refused.text
    assert "by column" in refused.text or "for each of the 2 columns" in refused.text
    assert "`encoded`" in refused.text
    assert used.status_code in (200, 202), used.text


def test_encoded_rows_are_answered_as_objects_are(client):
    by_column, encoded = (
        client.post("/predict", json={**PEOPLE, **request}).json()
        for request in ({"inputs": [PERSON]}, {"inputs": ROWS.tolist(), "encoded": True})
    )
    assert encoded == by_column
    strict = client.post("/predict", json={**PEOPLE, "inputs": [PERSON], "encoded": True})
    assert strict.json()["detail"].startswith("inputs.0: expected an array of 3")


def test_a_model_of_plain_arrays_takes_them_as_ever(client, digits_rows):
    for flag in ({}, {"encoded": True}):
        request = {"model": "digits", "inputs": digits_rows[:1].tolist(), **flag}
        assert client.post("/predict", json=request).status_code == 200


@pytest.mark.parametrize(
    "asked", [{"inputs": [PERSON]}, {"inputs_file": "rows.npy", "encoded": True}]
)
def test_a_job_reads_its_rows_as_they_came(client, asked):
    job = client.post("/predict/jobs", json={**PEOPLE, **asked}).json()
    wait_until(
        lambda: client.get(f"/jobs/{job['id']}").json()["state"] not in ("queued", "running")
    )
    assert client.get(f"/jobs/{job['id']}").json()["error"] is None
    arrays = np.load(io.BytesIO(client.get(f"/jobs/{job['id']}/result").content))
    at_once = client.post("/predict", json={**PEOPLE, "inputs": [PERSON]}).json()["predictions"]
    assert arrays["probabilities"][0].tolist() == at_once[0]["probabilities"]


def test_the_client_sends_frames_by_column_and_says_which_arrays_are_encoded(client):
    with Client(str(client.base_url)) as dubito:
        frame = dubito.predict(pandas.DataFrame([PERSON]), **PEOPLE)
        with pytest.raises(InvalidInput, match="inputs: expected rows as objects keyed by column"):
            dubito.predict(ROWS, **PEOPLE)
        encoded = dubito.predict(ROWS, encoded=True, **PEOPLE)
        np.testing.assert_array_equal(encoded.probabilities, frame.probabilities)
        assert len(dubito.acquire(ROWS, encoded=True, ids=["three"], k=1, **PEOPLE)) == 1
        retained = dubito.add_labels(
            {"two": "class 1"}, model="people", inputs={"two": ROWS[0]}, encoded=True
        )
        assert retained.accepted == 1
