import base64
import json
import tracemalloc

import httpx
import numpy as np
import pytest

from integrations.mlflow import scoring as mlflow
from integrations.mlflow.scoring import read_invocation
from service.request_context import RequestContext
from service.server.budget import ByteBudget, Reservation
from tests.support.images import pixel
from tests.support.serving import open_client, serving

JSON, CSV = "application/json", "text/csv"
PEOPLE = [{"age": 31.0, "city": "Rome"}, {"age": None, "city": None}]
SPLIT = {
    "columns": ["other", "city", "age"],
    "index": [5, 6],
    "data": [[1, "Rome", 31.0], [2, None, None]],
}
COLUMNS = {"age": [31.0, None], "city": ["Rome", None], "other": [1, 2]}
RECORDS = [{**row, "other": 1} for row in PEOPLE]


def post(client, content, media_type=JSON):
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    return client.post("/invocations", content=text, headers={"Content-Type": media_type})


def invoke(client, content):
    answer = post(client, content)
    assert answer.status_code == 200, answer.text
    return answer.json()


def get_error(answer, status=400, code="BAD_REQUEST"):
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == JSON
    assert set(answer.json()) == {"error_code", "message"}
    assert answer.json()["error_code"] == code
    return answer.json()["message"]


def predict(client, inputs, **fields):
    answer = client.post("/predict", json={"inputs": inputs, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("model", ["people", "rents"])
def test_tables_are_accepted_in_every_format(client, model):
    params = {"model": model, "seed": "7", "coverage": 0.9}
    expected = predict(client, PEOPLE, model=model, seed=7, coverage=0.9)
    for form, rows in (
        ("dataframe_split", SPLIT),
        ("dataframe_split", {**SPLIT, "data": [[1, "Rome", 31.0], [2, None, float("nan")]]}),
        ("dataframe_records", RECORDS),
        ("inputs", COLUMNS),
        ("inputs", PEOPLE),
        ("instances", PEOPLE),
    ):
        assert invoke(client, {form: rows, "params": params}) == expected, form


def test_numeric_rows_are_accepted_in_every_format(client, digits_rows):
    rows = digits_rows[:2].tolist()
    expected = predict(client, rows, model="digits", seed=7)
    pixels = [str(i) for i in range(64)]
    for form, content in (
        ("instances", rows),
        ("inputs", rows),
        ("inputs", digits_rows[:2].reshape(2, 8, 8).tolist()),
        ("inputs", {"pixels": rows}),
        ("instances", [{"pixels": row} for row in rows]),
        ("dataframe_split", {"columns": pixels, "data": rows}),
        ("dataframe_split", {"columns": ["pixels"], "data": [[row] for row in rows]}),
        ("dataframe_records", [dict(zip(pixels, row, strict=True)) for row in rows]),
    ):
        assert invoke(client, {form: content, "params": {"seed": 7}}) == expected, form


def test_texts_and_images_are_accepted_in_every_format(client):
    rows_by_model = {
        "texts": ["good film", "bad day"],
        "pictures": [base64.b64encode(pixel((128, 12, 250))).decode()] * 2,
    }
    for model, rows in rows_by_model.items():
        expected = predict(client, rows, model=model, seed=7)
        for form, content in (
            ("instances", rows),
            ("inputs", {"text": rows}),
            ("dataframe_split", {"columns": ["text"], "data": [[row] for row in rows]}),
            ("dataframe_records", [{"text": row} for row in rows]),
        ):
            assert (
                invoke(client, {form: content, "params": {"seed": 7, "model": model}}) == expected
            ), form
    extra_column = {
        "columns": ["stars", "text"],
        "data": [[3, text] for text in rows_by_model["texts"]],
    }
    expected = predict(client, rows_by_model["texts"], model="texts", seed=7)
    assert (
        invoke(client, {"dataframe_split": extra_column, "params": {"seed": 7, "model": "texts"}})
        == expected
    )


def test_long_requests_get_same_answer_as_predict(client, digits_rows):
    rows = np.tile(digits_rows, (3, 1)).tolist()
    expected = predict(client, rows, model="digits", seed=7)
    assert invoke(client, {"inputs": rows, "params": {"seed": 7}}) == expected
    frame = {"columns": list(range(64)), "data": rows}
    assert invoke(client, {"params": {"seed": 7}, "dataframe_split": frame}) == expected


def test_csv_is_read_as_table_for_default_model(kinds, client):
    text = b"city,age,other\nRome,31,x\n,,y\n"
    assert get_error(post(client, text, CSV)).startswith(
        "body: expected a CSV file for a model of columns or text"
    )
    with open_client(kinds, DUBITO_DEFAULT_MODEL="people", DUBITO_MAX_ROWS="2") as custom:
        answer = post(custom, text, CSV + "; charset=utf-8").json()
        assert answer == predict(custom, PEOPLE, seed=answer["seed"])
        assert (
            get_error(post(custom, text + b"Rome,3,z\n", CSV), 413)
            == "body: expected at most 2 rows, got 3"
        )
        assert "age: expected a number" in get_error(post(custom, b"city,age\nRome,old\n", CSV))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "body: expected JSON"),
        ({}, "body: expected one of dataframe_split, dataframe_records, instances, inputs, got 0"),
        ({"inputs": [], "instances": []}, "body: expected"),
        ({"inputs": [[0]], "signature_name": "x"}, "body: expected one of dataframe_split"),
        ({"inputs": []}, "inputs: expected at least one row, got none"),
        ({"inputs": 3}, "inputs: expected an array of rows, got 3"),
        ({"inputs": {}}, "inputs: expected arrays of equal length, by column"),
        ({"inputs": {"a": [1], "b": [2]}}, "inputs: expected a single array"),
        ({"inputs": [[0]]}, "inputs.0: expected an array of 64"),
        ({"inputs": [[0]], "params": []}, "params: expected an object, got an array of 0"),
        ({"inputs": [[0]], "params": {"sead": 1}}, "params.sead: expected one of"),
        ({"inputs": [[0]], "params": {"fpr": 2}}, "params.fpr: expected less than 1, got 2"),
        ({"inputs": [[0]], "params": {"model": 3}}, "params.model: expected a valid string"),
        ({"dataframe_split": {"columns": ["a"]}}, "dataframe_split: expected an object"),
        (
            {"dataframe_split": {"columns": ["a", "a"], "data": []}},
            "dataframe_split.columns: expected an array of dist",
        ),
        ({"dataframe_split": {"columns": ["a"], "data": [3]}}, "dataframe_split.data.0: expected"),
        ({"dataframe_split": {"columns": ["a"], "data": 3}}, "dataframe_split.data: expected"),
        ({"dataframe_records": [3]}, "dataframe_records: expected an array of objects"),
        ({"dataframe_records": [{"a": 1}, {"b": 1}]}, "dataframe_records.1: expected the columns"),
        (
            {"dataframe_records": [{"age": 1}], "params": {"model": "people"}},
            "dataframe_records: expected a column city",
        ),
    ],
)
def test_invalid_requests_get_specific_errors(client, content, message):
    assert get_error(post(client, content)).startswith(message)


def test_all_errors_have_mlflow_format(client, kinds):
    unknown = post(client, {"inputs": [[0]], "params": {"model": "nothing"}})
    assert get_error(unknown, 404, "RESOURCE_DOES_NOT_EXIST").startswith("model: expected one of")
    assert get_error(client.get("/invocations"), 405) == "method: expected POST, got GET"
    assert get_error(post(client, b"x", "text/plain"), 415).startswith(
        "Content-Type: expected application/json or text/csv"
    )
    assert get_error(client.post("/invocations?seed=3", json={})).startswith(
        "query: expected no parameters"
    )
    with open_client(kinds, DUBITO_API_KEYS="the-key-of-the-team") as custom:
        assert get_error(post(custom, {"inputs": [[0]]}), 401, "UNAUTHENTICATED").startswith(
            "key: expected a valid key"
        )
        custom.headers["X-API-Key"] = "the-key-of-the-team"
        assert "since there are several" in get_error(post(custom, {"inputs": [[0]]}))
        assert custom.get("/ping", headers={"X-API-Key": ""}).status_code == 200


def test_ping_succeeds_only_if_a_model_is_published(client, tmp_path):
    answer = client.get("/ping")
    assert (answer.status_code, answer.content) == (200, b"\n")
    assert client.get("/version").text == client.get("/openapi.json").json()["info"]["version"]
    with serving(tmp_path) as (url, _):
        assert get_error(httpx.get(f"{url}/ping"), 503, "TEMPORARILY_UNAVAILABLE").startswith(
            "no model is published"
        )


def test_replacing_nan_uses_less_than_four_times_the_body_size():
    body = b'{"inputs": [[' + b", ".join([b"NaN"] * 200_000) + b"]]}"
    tracemalloc.start()
    try:
        changed = mlflow._without_nan(body, RequestContext())
        assert tracemalloc.get_traced_memory()[1] < 4 * len(body)
    finally:
        tracemalloc.stop()
    assert changed == body.replace(b"NaN", b"null")


@pytest.mark.parametrize(
    "text", ['{"inputs": [[NaN, "NaN", "\\"NaN", "x"], [NaN, NaN, "N", "NaNa"]], "params": {}}']
)
def test_nan_becomes_null_except_in_strings(text):
    _, form, rows = read_invocation(
        text.encode(), 10, RequestContext(Reservation(ByteBudget(1 << 20)))
    )
    expected = json.loads(text.replace("[NaN", "[null").replace(" NaN", " null"))
    assert (form, rows) == ("inputs", expected["inputs"])


def test_many_nested_arrays_are_rejected_before_parsing(client):
    body = b'{"inputs": [' + b",".join([b"[]"] * 700_000) + b"]}"
    answer = client.post("/invocations", content=body, headers={"Content-Type": "application/json"})
    assert "arrays and objects" in get_error(answer, 413)
