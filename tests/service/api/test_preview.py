import base64
import json

import numpy as np
import pytest

from tests.support.files import npy_bytes, npz_bytes, parquet_bytes, zip_bytes

NPY = "application/x-npy"


def preview(client, content, media_type, rows=None, **query):
    if rows is not None:
        query["rows"] = json.dumps(rows)
    headers = {"Content-Type": media_type}
    return client.post("/acquire/preview", params=query, content=content, headers=headers)


def to_npz(array):
    return npz_bytes(x=array, ids=np.array([f"r{i}" for i in range(len(array))]))


def to_parquet(array):
    ids = [f"r{i}" for i in range(len(array))]
    return parquet_bytes({"id": ids, "x": list(array), "note": ids})


FORMATS = {
    NPY: npy_bytes,
    "application/x-npz": to_npz,
    "application/vnd.apache.parquet": to_parquet,
}


@pytest.mark.parametrize("media_type", FORMATS)
def test_preview_shows_rows_in_requested_order(client, digits_rows, media_type):
    rows = np.asarray(digits_rows[:20], dtype=np.float32).reshape(20, 64)
    answer = preview(client, FORMATS[media_type](rows), media_type, [17, 0, 99]).json()
    assert (answer["model"], answer["rows"]) == ("digits", 20)
    assert [row["index"] for row in answer["preview"]] == [17, 0]
    assert [row["row"] for row in answer["preview"]] == rows[[17, 0]].tolist()
    names = ["17", "0"] if media_type == NPY else ["r17", "r0"]
    assert [row["id"] for row in answer["preview"]] == names
    is_parquet = "parquet" in media_type
    assert answer["ignored_columns"] == (["note"] if is_parquet else [])


def test_rows_parameter_can_be_repeated(client):
    query, npy = "rows=1&rows=0", {"Content-Type": "application/x-npy"}
    content = npy_bytes(np.zeros((2, 64)))
    answer = client.post(f"/acquire/preview?{query}", content=content, headers=npy).json()
    assert [row["index"] for row in answer["preview"]] == [1, 0]


def test_preview_shows_first_ten_rows_by_default(client, digits_rows):
    content = npy_bytes(np.asarray(digits_rows[:20], dtype=np.float32).reshape(20, 64))
    rows = preview(client, content, NPY).json()["preview"]
    assert [row["index"] for row in rows] == list(range(10))
    assert preview(client, content, NPY, []).json()["preview"] == []


@pytest.mark.parametrize(
    ("content", "media_type", "query", "status", "message"),
    [
        (b"rubbish", NPY, {}, 422, "pool: expected a whole npy file of numbers"),
        (npy_bytes(np.zeros((3, 65))), NPY, {}, 422, "pool: expected an array of shape"),
        (b"a,b\n1,2\n", "text/csv", {}, 422, "a CSV file for a model of columns or text"),
        (b"{}", "application/json", {}, 415, "Content-Type"),
        (npy_bytes(np.zeros((3, 64))), NPY, {"model": "no"}, 404, "model: "),
        (npy_bytes(np.zeros((3, 64))), NPY, {"rows": [-1]}, 422, "rows.0"),
        (npy_bytes(np.zeros((3, 64))), NPY, {"rows": [0] * 1001}, 422, "rows"),
        (npy_bytes(np.zeros((3, 64))), NPY, {"seed": 7}, 422, "seed: expected one of"),
        (npy_bytes(np.zeros((3, 64))), NPY, {"pool_file": "a.npy"}, 422, "pool_file"),
    ],
)
def test_invalid_previews_are_refused(client, content, media_type, query, status, message):
    answer = preview(client, content, media_type, **query)
    assert answer.status_code == status, answer.text
    assert message in answer.json()["detail"]


def test_files_in_a_zip_are_shown_as_base64_and_table_rows_as_objects(tmp_path):
    from model_store.artifacts.manifest import (
        CategoricalColumn,
        ImageSpec,
        InputSpec,
        NumericColumn,
    )
    from model_store.sources.files import open_rows
    from service.api.acquire import preview_rows

    spec = InputSpec(shape=(2, 3), minimum=0.0, maximum=255.0, image=ImageSpec(mode="L"))
    pool = open_rows(zip_bytes({"a.png": b"one", "b.png": b"two"}), spec, "pool", ".zip")
    (row,) = preview_rows(pool, [1])
    assert (row["id"], base64.b64decode(row["row"])) == ("b.png", b"two")
    columns = (
        NumericColumn(name="age", mean=0.0, std=1.0, indicator=False),
        CategoricalColumn(name="city", categories=("Oslo",)),
    )
    spec = InputSpec(shape=(3,), minimum=-9.0, maximum=9.0, columns=columns)
    pool = open_rows(b"city;age\nOslo;1,5\nRome;\n", spec, "pool", ".csv")
    assert [row["row"] for row in preview_rows(pool, [0, 1])] == [
        {"age": 1.5, "city": "Oslo"},
        {"age": None, "city": "Rome"},
    ]


def test_preview_stops_at_its_size_limit(monkeypatch):
    from model_store.artifacts.manifest import InputSpec
    from model_store.sources.files import open_rows
    from service.api import acquire

    spec = InputSpec(shape=(4,), minimum=0.0, maximum=9.0)
    pool = open_rows(npy_bytes(np.zeros((9, 4))), spec, "pool", ".npy")
    monkeypatch.setattr(acquire, "MAX_PREVIEW_BYTES", 3 * len(b"[0.0,0.0,0.0,0.0]"))
    assert [row["index"] for row in acquire.preview_rows(pool, list(range(9)))] == [0, 1, 2]
