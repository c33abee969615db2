import gzip
import json

import numpy as np
import pytest

from tests.support.open_inference import (
    HEADER,
    ROW,
    binary_tensor,
    get_error,
    post,
    string_tensor,
    tensor,
)
from tests.support.raw import Connection
from tests.support.serving import open_client


def make_request(**fields):
    return {"inputs": [{**ROW, **fields}]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "body: expected JSON"),
        (b"[]", "body: expected a JSON object, got an array of 0"),
        (b"{", "body: expected JSON"),
        ({}, "inputs: expected an array of at least one tensor, got none"),
        ({"inputs": []}, "inputs: expected an array of at least one tensor, got none"),
        ({"inputs": "x"}, "inputs: expected an array of at least one tensor, got a string of 1"),
        ({"inputs": [3]}, "inputs.0: expected an object, got 3"),
        ({"inputs": [ROW], "more": 1}, "body: expected only the fields id, inputs, model_name"),
        ({"inputs": [ROW], "id": 3}, "id: expected a string of up to 1024 characters, got 3"),
        ({"inputs": [ROW], "parameters": []}, "parameters: expected an object, got an array of 0"),
        ({"inputs": [ROW], "parameters": {"sead": 3}}, "parameters.sead: expected one of"),
        ({"inputs": [ROW], "parameters": {"explain": True}}, "parameters.explain: expected one of"),
        ({"inputs": [ROW], "parameters": {"<b>": 3}}, "parameters: expected one of"),
        ({"inputs": [ROW], "parameters": {"seed": -1}}, "parameters.seed: expected greater than"),
        ({"inputs": [ROW], "parameters": {"seed": "x"}}, "parameters.seed: expected"),
        ({"inputs": [ROW], "parameters": {"fpr": "1.5"}}, "parameters.fpr: expected less than"),
        ({"inputs": [ROW], "parameters": {"num_samples": 9999}}, "num_samples: expected at most"),
        ({"inputs": [ROW], "parameters": {"timeout": -1}}, "parameters.timeout: expected"),
        (
            {"inputs": [ROW], "parameters": {"timeout": 5, "deadline_s": 1}},
            "parameters.timeout: expected either timeout or deadline_s",
        ),
        (
            {"inputs": [ROW], "parameters": {"binary_data_output": 1}},
            "parameters.binary_data_output: expected true or false",
        ),
        ({"inputs": [ROW], "outputs": [{"name": "nothing"}]}, "outputs.0.name: expected one of"),
        ({"inputs": [ROW], "outputs": [{"name": "label"}] * 2}, "outputs.1: expected outputs"),
        ({"inputs": [ROW], "outputs": [{}]}, "outputs.0.name: expected a string of 1 to 1000"),
        (
            {"inputs": [ROW], "outputs": [{"name": "label", "parameters": {"classification": 3}}]},
            "outputs.0.parameters: expected only binary_data",
        ),
        (make_request(name=""), "inputs.0.name: expected a string of 1 to 1000"),
        (make_request(datatype="STRING"), "inputs.0.datatype: expected one of BOOL, INT8"),
        (make_request(datatype="BOOL", data=[True] * 64), "inputs.0.datatype: expected a numeric"),
        (make_request(datatype="BYTES", data=["a"] * 64), "inputs.0.datatype: expected a numeric"),
        (make_request(shape=[1, 63]), "inputs.0.data: expected 63 elements, by its shape, got 64"),
        (make_request(shape=[64, 1]), "inputs: expected an array of shape (N, 8, 8)"),
        (make_request(shape=[0, 64]), "inputs.0.shape: expected an array of 1 to 32 whole numbers"),
        (make_request(data=None), "inputs.0: expected either data"),
        (make_request(data=[None] * 64), "inputs.0.0: expected a finite number in float32's range"),
        (
            make_request(data=[1e300] * 64),
            "inputs.0.0: expected a finite number in float32's range",
        ),
        (make_request(more=1), "inputs.0: expected only the fields data, datatype, name"),
        (make_request(parameters={"binary_data_size": 4}), "inputs.0: expected either data"),
        (make_request(parameters={"shared_memory_region": "x"}), "inputs.0.parameters: expected"),
        ({"inputs": [ROW, {**ROW, "name": "y"}]}, "inputs: expected one tensor of rows, got 2"),
        ({"inputs": [ROW, ROW]}, "inputs: expected tensors with distinct names, got duplicates"),
    ],
)
def test_invalid_requests_get_specific_errors(client, content, message):
    assert get_error(post(client, content)).startswith(message)


def test_invalid_tables_get_specific_errors(client):
    age, city = tensor(np.array([31.0]), "age"), string_tensor(["Rome"], "city")

    def get_table_error(*inputs):
        return get_error(post(client, {"inputs": inputs}, "people"))

    missing = "inputs: expected a tensor for each of the 2 columns, got none for 'city'"
    assert get_table_error(age) == missing
    assert get_table_error(age, city, string_tensor(["x"], "more")).startswith(
        "inputs.2.name: expected one of the columns age, city"
    )
    longer = string_tensor(["Rome", "Oslo"], "city")
    assert (
        get_table_error(age, longer)
        == "inputs.1.shape: expected 1 rows, like the other tensors, got 2"
    )
    wide = {**tensor(np.array([[31.0, 2.0]]), "age")}
    assert get_table_error(wide, city).startswith("inputs.0.shape: expected (N,) or (N, 1)")
    assert (
        get_table_error(string_tensor(["old"], "age"), city)
        == "inputs.0.age: expected a number, or null, got a string of 3 characters"
    )
    base64_parameters = {"parameters": {"content_type": "base64"}}
    expected = "parameters.content_type: expected plain text (str), or none, got base64"
    assert (
        get_table_error(age, {**string_tensor(["Um9tZQ=="], "city"), **base64_parameters})
        == f"inputs.1.{expected}"
    )
    text = {**string_tensor(["Z29vZA=="], "text"), **base64_parameters}
    assert get_error(post(client, {"inputs": [text]}, "texts")) == f"inputs.0.{expected}"
    boolean = {"name": "age", "datatype": "BOOL", "shape": [1], "data": [True]}
    assert (
        get_table_error(boolean, city)
        == "inputs.0.datatype: expected a numeric datatype, or BYTES, got BOOL"
    )


@pytest.mark.parametrize(
    ("length", "sizes", "message"),
    [
        ("0", [256], "a length from 1 to"),
        ("-1", [256], "a length from 1 to"),
        ("x", [256], "a length from 1 to"),
        ("99999999", [256], "a length from 1 to"),
        ("9" * 30, [256], "a length from 1 to"),
        (None, [255], "inputs.0: expected a binary_data_size that matches FP32"),
        (None, [257], "inputs.0.parameters.binary_data_size: expected up to 256, the remaining"),
        (None, [1 << 62], "inputs.0.parameters.binary_data_size: expected"),
        (None, [-4], "inputs.0.parameters.binary_data_size: expected up to"),
        (None, [True], "inputs.0.parameters.binary_data_size: expected up to"),
        (None, ["256"], "inputs.0.parameters.binary_data_size: expected up to"),
        (None, [128, 128], "inputs.0: expected a binary_data_size that matches FP32"),
    ],
)
def test_wrong_binary_lengths_are_rejected(client, length, sizes, message):
    tensors = [
        {**binary_tensor("FP32", [1, 64], b"", f"{n}"), "parameters": {"binary_data_size": size}}
        for n, size in enumerate(sizes)
    ]
    text = json.dumps({"inputs": tensors}).encode()
    headers = {HEADER: str(len(text)) if length is None else length}
    answer = post(client, text + bytes(256), headers=headers)
    assert message in get_error(answer)
    if sizes == [256] and length == "0":
        correct_headers = {**headers, HEADER: str(len(text))}
        accepted = post(client, text + bytes(256), headers=correct_headers)
        assert accepted.status_code == 200
        longer = post(client, text + bytes(257), headers=correct_headers)
        assert (
            get_error(longer)
            == "body: expected binary data of the total binary_data_size, got 1 more bytes"
        )
        shortened = post(client, text + bytes(256), headers={HEADER: str(len(text) - 1)})
        assert "body: expected JSON" in get_error(shortened)


def test_all_errors_follow_protocol(client):
    for path, message in {
        "nothing": "path: expected a path listed by docs/open-inference.md",
        "models/digits/nothing": "path: expected",
        "repository/models/digits/load": "path: expected",
        "models/nothing": "model: expected one of",
        "models/digits/versions/9": "version: expected one of",
        "models/digits/versions/9/ready": "version: expected one of",
    }.items():
        assert get_error(client.get(f"/v2/{path}"), 404).startswith(message)
    assert get_error(post(client, make_request(), "nothing"), 404).startswith("model: expected")
    wrong_method = client.put("/v2/models/digits/infer", json={"inputs": [ROW]})
    assert wrong_method.headers["Allow"] == "POST"
    assert get_error(wrong_method, 405) == "method: expected POST, got PUT"
    wrong_coding = post(client, b"{}", headers={"Content-Encoding": "br"})
    assert get_error(wrong_coding, 415).startswith("Content-Enc")
    timed_out = post(client, {"inputs": [ROW], "parameters": {"timeout": 1}})
    assert get_error(timed_out, 504) == "the request's deadline passed before the answer was ready"
    too_many_rows = post(client, make_request(shape=[5000, 64], data=[0] * 5000 * 64))
    assert get_error(too_many_rows, 413).startswith("inputs.0.shape: expected at most 4096 rows")
    assert get_error(
        client.post("/v2/models/digits/infer?seed=3", json={"inputs": [ROW]})
    ).startswith("query: expected no parameters")
    assert get_error(client.post("/v2/repository/index", content=b'{"all": 1}')).startswith(
        "body: expected an empty body"
    )


def test_malformed_framing_errors_follow_protocol(url):
    port = int(url.rpartition(":")[2])
    head = b"POST /v2/models/digits/infer HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    with Connection(port) as connection:
        answer = connection.ask(head + b"xyz\r\n")
    assert answer.status == 400
    assert answer.headers[b"content-type"] == b"application/json"
    assert json.loads(answer.body)["error"].startswith("malformed request framing")
    with Connection(port) as connection:
        answer = connection.ask(head.replace(b"/v2/models/digits/infer", b"/predict") + b"xyz\r\n")
    assert json.loads(answer.body)["detail"].startswith("malformed request framing")


def test_size_limits_apply_before_parsing(kinds, digits_rows):
    settings = {"DUBITO_MAX_BODY_BYTES": "200000", "DUBITO_MAX_ROWS": "100"}
    limits = {"MAX_JSON_BYTES": 100_000}
    settings["DUBITO_MEMORY_BUDGET_BYTES"] = str(2 << 20)
    with open_client(kinds, limits=limits, **settings) as client:
        bomb, headers = gzip.compress(bytes(300 << 20)), {"Content-Encoding": "gzip"}
        error = get_error(post(client, bomb[:90_000], headers=headers), 413)
        assert error == "body: expected at most 100000 bytes when inflated, got more"
        error = get_error(post(client, bytes(100_001)), 413)
        assert error == "body: expected at most 100000 bytes, got more"
        long_body = json.dumps({"inputs": [ROW]}).encode() + b" " * 110_000
        assert get_error(
            post(client, long_body, headers={HEADER: str(len(long_body))}),
            413,
        )
        rows = digits_rows[:101].astype("u1")
        part = rows.tobytes()
        head = binary_tensor("UINT8", [101, 64], part)
        error = get_error(post(client, {"inputs": [head]}, parts=[part]), 413)
        assert "at most 100 rows" in error
        large = {"inputs": [{**ROW, "shape": [100, 64], "data": [1] * 6400}] * 7}
        assert post(client, json.dumps(large, separators=(",", ":")).encode()).status_code == 413, (
            "memory budget exceeded"
        )
        deep = b'{"inputs": ' + b"[" * 40_000
        assert "JSON" in get_error(post(client, deep))
        assert get_error(post(client, b'{"inputs": ' + b"[" * 80_000), 413)
        for value in (b"1" * 90_000, b'"' + b"a" * 90_000 + b'"'):
            assert get_error(post(client, b'{"inputs": [' + value + b"]}"))
