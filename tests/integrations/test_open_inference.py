import base64
import gzip
import io
import json
import shutil
import struct
import zlib

import numpy as np
import pytest

from tests.support.images import pixel
from tests.support.raw import Connection
from tests.support.serving import metric, open_client
from tests.support.tiny import GROUPS

HEADER = "Inference-Header-Content-Length"
PEOPLE = [{"age": 31.0, "city": "Rome"}, {"age": None, "city": None}]
OPTIONAL_OUTPUTS = {"samples", "classes", "abstain"}
PICTURE = pixel((128, 12, 250))


def tensor(array, name="inputs", **fields):
    """Create a JSON tensor of numbers."""
    datatype = {"f": "FP", "i": "INT", "u": "UINT"}[array.dtype.kind] + str(8 * array.itemsize)
    return {
        "name": name,
        "datatype": datatype,
        "shape": list(array.shape),
        "data": array.ravel().tolist(),
        **fields,
    }


def string_tensor(values, name="inputs"):
    """Create a JSON tensor of BYTES."""
    return {"name": name, "datatype": "BYTES", "shape": [len(values)], "data": values}


def binary_tensor(datatype, shape, content, name="x"):
    """Create a tensor whose elements follow the JSON."""
    size = {"binary_data_size": len(content)}
    return {"name": name, "datatype": datatype, "shape": shape, "parameters": size}


def encode_elements(values):
    """Encode BYTES elements with their lengths."""
    return b"".join(struct.pack("<I", len(value)) + value for value in values)


def post(client, content, model="digits", parts=(), headers=(), encode=None):
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    headers = dict(headers) | ({HEADER: str(len(text))} if parts else {})
    body = b"".join([text, *parts])
    return client.post(
        f"/v2/models/{model}/infer", content=encode(body) if encode else body, headers=headers
    )


def infer(client, inputs, model="digits", parts=(), **fields):
    """Send a valid request and return the JSON response."""
    answer = post(client, {"inputs": inputs, "parameters": {"seed": 7}, **fields}, model, parts)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/json"
    return answer.json()


def get_arrays(answer):
    return {o["name"]: np.array(o["data"]).reshape(o["shape"]) for o in answer["outputs"]}


def get_binary_arrays(answer):
    length = int(answer.headers[HEADER])
    remaining, actual = answer.content[length:], {}
    for output in json.loads(answer.content[:length])["outputs"]:
        if "data" in output:
            continue
        size = output["parameters"]["binary_data_size"]
        content, remaining = remaining[:size], remaining[size:]
        if output["datatype"] == "BYTES":
            values = []
            while content:
                (length,) = struct.unpack("<I", content[:4])
                values.append(content[4 : 4 + length].decode())
                content = content[4 + length :]
            array = np.array(values)
        else:
            kinds = {"BOOL": "?", "INT64": "<i8", "FP64": "<f8", "FP32": "<f4"}
            array = np.frombuffer(content, kinds[output["datatype"]])
        actual[output["name"]] = array.reshape(output["shape"])
    assert remaining == b""
    return actual


def get_error(answer, status=400):
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert set(answer.json()) == {"error"}
    return answer.json()["error"]


def predict(client, inputs, model="digits", **fields):
    request = {"model": model, "inputs": inputs, "seed": 7, **fields}
    answer = client.post("/predict", json=request, headers={"Accept": "application/x-npz"})
    assert answer.status_code == 200, answer.text
    with np.load(io.BytesIO(answer.content)) as file:
        return dict(file)


def assert_same(actual, expected):
    extra = {"model", "version", "seed", "fpr", "fdr", "coverage", "confidence", "risk", "priors"}
    extra |= {"unknown_categories", "columns", *({"classes"} - set(actual))}
    assert set(actual) == set(expected) - extra
    for name, array in actual.items():
        np.testing.assert_array_equal(array, expected[name], err_msg=name)


# Predictions


@pytest.mark.parametrize("dtype", ["f4", "f8", "u1", "i8"])
def test_json_rows_get_same_answer_as_predict(client, digits_rows, dtype):
    rows = digits_rows[:3].astype(dtype)
    expected = predict(client, rows.tolist())
    assert_same(get_arrays(infer(client, [tensor(rows)])), expected)
    nested = tensor(rows.reshape(3, 8, 8), "by another name", data=rows.reshape(3, 8, 8).tolist())
    assert_same(get_arrays(infer(client, [nested])), expected)


def test_binary_rows_get_same_answer_as_predict(client, digits_rows):
    rows = digits_rows[:70]
    expected = predict(client, rows.tolist())
    for datatype, dtype in (("FP32", "<f4"), ("FP16", "<f2")):
        part = rows.astype(dtype).tobytes()
        content = {
            "inputs": [binary_tensor(datatype, [70, 64], part)],
            "parameters": {"seed": 7, "binary_data_output": True},
        }
        answer = post(client, content, parts=[part], headers={"Content-Type": ""})
        assert answer.headers["content-type"] == "application/octet-stream"
        assert_same(get_binary_arrays(answer), expected)


def test_long_json_gets_same_answer_as_predict(client, digits_rows):
    rows = np.tile(digits_rows, (3, 1))
    text = json.dumps({"inputs": [tensor(rows)], "parameters": {"seed": 7}}, indent=1).encode()
    assert len(text) > 4 * 65_536
    answer = post(client, text)
    assert answer.status_code == 200, answer.text
    assert_same(get_arrays(answer.json()), predict(client, rows.tolist()))


def test_images_are_accepted_as_bytes_base64_and_arrays(client):
    pixels = np.array([128, 12, 250], dtype=np.uint8).reshape(1, 3, 1, 1)
    expected = predict(client, pixels.tolist(), "pictures")
    assert_same(get_arrays(infer(client, [tensor(pixels)], "pictures")), expected)
    assert_same(
        get_arrays(
            infer(client, [string_tensor([base64.b64encode(PICTURE).decode()])], "pictures")
        ),
        expected,
    )
    content = encode_elements([PICTURE])
    request = [binary_tensor("BYTES", [1, 1], content)]
    assert_same(get_arrays(infer(client, request, "pictures", [content])), expected)


def test_texts_are_accepted_as_bytes_and_strings(client):
    texts = ["good film", "ein ünbekanntes wort"]
    expected = predict(client, texts, "texts")
    assert_same(get_arrays(infer(client, [string_tensor(texts)], "texts")), expected)
    content = encode_elements([text.encode() for text in texts])
    request = [binary_tensor("BYTES", [2], content)]
    assert_same(get_arrays(infer(client, request, "texts", [content])), expected)


@pytest.mark.parametrize("model", ["people", "rents"])
def test_tables_are_accepted_as_one_tensor_per_column(client, model):
    expected = predict(client, PEOPLE, model)
    age = {"name": "age", "datatype": "FP64", "shape": [2, 1], "data": [31.0, None]}
    for city in (["Rome", None], ["Rome", ""], ["Rome", "NA"]):
        answer = infer(client, [string_tensor(city, "city"), age], model)
        assert_same(get_arrays(answer), expected)
    age_strings = string_tensor(["31", ""], "age")
    assert_same(
        get_arrays(infer(client, [age_strings, string_tensor(["Rome", ""], "city")], model)),
        expected,
    )
    ages, cities = np.array([31.0, np.nan]).tobytes(), encode_elements([b"Rome", b""])
    inputs = [binary_tensor("FP64", [2], ages, "age"), binary_tensor("BYTES", [2], cities, "city")]
    assert_same(get_arrays(infer(client, inputs, model, [ages, cities])), expected)


def test_long_tables_get_same_answer_as_predict(client):
    ages = np.arange(3000.0) % 90
    inputs = [tensor(ages, "age"), string_tensor(["Rome", "Oslo"] * 1500, "city")]
    rows = [
        {"age": age, "city": city}
        for age, city in zip(ages.tolist(), inputs[1]["data"], strict=True)
    ]
    assert_same(get_arrays(infer(client, inputs, "people")), predict(client, rows, "people"))
    content = encode_elements([text.encode() for text in inputs[1]["data"]])
    inputs[1] = binary_tensor("BYTES", [3000], content, "city")
    expected = predict(client, rows, "people")
    assert_same(get_arrays(infer(client, inputs, "people", [content])), expected)


def test_groups_are_accepted_as_a_tensor(client):
    rows = np.zeros((3, 3))
    groups = [GROUPS[0], "another", GROUPS[2]]
    answer = infer(client, [tensor(rows), string_tensor(groups, "groups")], "groups")
    assert_same(get_arrays(answer), predict(client, rows.tolist(), "groups", groups=groups))
    assert get_arrays(infer(client, [tensor(rows)], "groups"))["category"].tolist() == ["", "", ""]
    described = client.get("/v2/models/groups").json()["inputs"]
    assert described[1] == {
        "name": "groups",
        "datatype": "BYTES",
        "shape": [-1],
        "parameters": {"optional": True},
    }


def test_parameters_can_be_numbers_or_strings_and_are_returned(client, digits_rows):
    rows = digits_rows[:4]
    options = {"seed": 9, "num_samples": 20, "fpr": 0.1, "coverage": 0.9, "confidence": 0.5}
    expected = predict(client, rows.tolist(), **options)
    for parameters in (options, {name: str(value) for name, value in options.items()}):
        answer = infer(client, [tensor(rows)], parameters=parameters)
        assert answer["parameters"] == options
        assert_same(get_arrays(answer), expected)
    fdr = infer(client, [tensor(rows)], parameters={"fdr": "0.2", "seed": 1})["parameters"]
    assert fdr == {"fdr": 0.2, "seed": 1, "fpr": 0.05, "coverage": 0.95, "num_samples": 100}
    priors = {str(digit): 0.1 for digit in range(10)}
    answer = infer(client, [tensor(rows)], parameters={"priors": json.dumps(priors), "seed": 7})
    assert json.loads(answer["parameters"]["priors"]) == [0.1] * 10
    fresh = infer(client, [tensor(rows)], parameters={})
    replayed = infer(client, [tensor(rows)], parameters={"seed": fresh["parameters"]["seed"]})
    assert replayed["outputs"] == fresh["outputs"]


def test_reserved_client_fields_are_ignored(client, digits_rows):
    reserved = {"sequence_id": 3, "sequence_start": True, "sequence_end": False, "priority": 1}
    reserved |= {"content_type": "np", "triton_enable_empty_final_response": True, "timeout": 0}
    parameters = {"seed": 7, "headers": {"a": "b"}, **reserved}
    model_fields = {"model_name": "x", "model_version": "3"}
    answer = infer(client, [tensor(digits_rows[:1])], parameters=parameters, **model_fields)
    assert answer["parameters"] == {"seed": 7, "num_samples": 100, "fpr": 0.05, "coverage": 0.95}


def test_response_repeats_or_creates_an_id(client, digits_rows):
    rows = [tensor(digits_rows[:1])]
    assert infer(client, rows, id='ünser "id"')["id"] == 'ünser "id"'
    for id_field in ({}, {"id": ""}, {"id": None}):
        answer = post(
            client, {"inputs": rows, **id_field}, headers={"X-Request-ID": "of-the-caller"}
        )
        assert answer.json()["id"] == answer.headers["x-request-id"] == "of-the-caller"
    assert len(infer(client, rows)["id"]) == 32


def test_requested_outputs_are_returned_in_order(client, digits_rows):
    rows = digits_rows[:2]
    names = ["classes", "samples", "p_value", "label"]
    answer = infer(client, [tensor(rows)], outputs=[{"name": name} for name in names])
    assert [output["name"] for output in answer["outputs"]] == names
    actual, expected = get_arrays(answer), predict(client, rows.tolist(), return_samples=True)
    for name in names:
        exact = expected[name].dtype.kind != "f" or expected[name].dtype.itemsize == 8
        displayed = actual[name] if exact else actual[name].astype(expected[name].dtype)
        np.testing.assert_array_equal(displayed, expected[name])
    assert not {"samples", "classes"} & set(get_arrays(infer(client, [tensor(rows)])))
    mean = infer(
        client,
        [tensor(np.array([31.0]), "age"), string_tensor(["Rome"], "city")],
        "rents",
        outputs=[{"name": "samples.mean"}],
    )
    assert mean["outputs"][0]["shape"] == [1, mean["parameters"]["num_samples"]]
    risk = infer(client, [tensor(rows)], outputs=[{"name": "abstain"}], parameters={"risk": 0.9})
    assert risk["outputs"][0]["datatype"] == "BOOL"


@pytest.mark.parametrize("request_flag", [None, False, True])
@pytest.mark.parametrize("output_flag", [None, False, True])
def test_binary_flag_of_output_overrides_request(client, digits_rows, request_flag, output_flag):
    parameters = {"seed": 7} | (
        {} if request_flag is None else {"binary_data_output": request_flag}
    )
    output = {"name": "probabilities"} | (
        {} if output_flag is None else {"parameters": {"binary_data": output_flag}}
    )
    content = {
        "inputs": [tensor(digits_rows[:1])],
        "outputs": [output, {"name": "label"}],
        "parameters": parameters,
    }
    answer = post(client, content)
    is_binary = request_flag if output_flag is None else output_flag
    assert (HEADER in answer.headers) == bool(is_binary or request_flag)
    actual = {**get_binary_arrays(answer)} if HEADER in answer.headers else {}
    assert ("probabilities" in actual) == bool(is_binary)
    assert ("label" in actual) == bool(request_flag)


def test_forwarded_response_is_accepted_as_request(client, digits_rows):
    rows = digits_rows[:2]
    tensors = [tensor(np.zeros((5, 2), dtype=np.float32), "other"), tensor(rows)]
    forwarded = {
        "id": "a step",
        "model_name": "before",
        "model_version": "2",
        "parameters": {"seed": 3, "other": "x"},
    }
    answer = post(client, {**forwarded, "outputs": tensors}).json()
    assert (answer["id"], answer["model_name"]) == ("a step", "digits")
    assert answer["parameters"]["seed"] != 3, "the parameters belong to the previous response"
    assert post(client, {**forwarded, "outputs": [tensor(rows, "scaled")]}).status_code == 200
    cells = [
        tensor(np.array([31.0]), "age"),
        string_tensor(["Rome"], "city"),
        string_tensor(["x"], "more"),
    ]
    assert post(client, {**forwarded, "outputs": cells}, "people").status_code == 200
    assert "a tensor for each" in get_error(
        post(client, {**forwarded, "outputs": cells[:1]}, "people")
    )


@pytest.mark.parametrize("version", ["1", "latest"])
def test_version_can_be_selected_in_path(client, digits_rows, version):
    content = json.dumps({"inputs": [tensor(digits_rows[:1])], "parameters": {"seed": 7}})
    answer = client.post(f"/v2/models/digits/versions/{version}/infer", content=content).json()
    assert answer["model_version"] == "1"
    assert client.get(f"/v2/models/digits/versions/{version}").json()["versions"] == ["1"]
    assert client.get(f"/v2/models/digits/versions/{version}/ready").json() == {
        "name": "digits",
        "ready": True,
    }


@pytest.mark.parametrize(
    ("coding", "encode"), [("gzip", gzip.compress), ("deflate", zlib.compress)]
)
def test_bodies_can_be_compressed(client, digits_rows, coding, encode):
    rows = np.tile(digits_rows, (12, 1))[:4000]
    part, outputs = rows.tobytes(), [{"name": "label"}]
    inputs = [binary_tensor("FP32", [4000, 64], part)]
    content = {"inputs": inputs, "parameters": {"seed": 7}, "outputs": outputs}
    headers = {"Content-Encoding": coding}
    answer = post(client, content, parts=[part], headers=headers, encode=encode)
    assert answer.status_code == 200, answer.text
    plain = infer(client, inputs, parts=[part], outputs=outputs)
    assert answer.json()["outputs"] == plain["outputs"]
    full = encode(b"{}")
    for bad in (full[:-3], full + b"x", b"{}", b"", full + full):
        error = get_error(post(client, bad, headers=headers))
        assert (
            error
            == f"body: expected a body compressed with {coding} (Content-Encoding), got another"
        )


# Errors

ROW = {"name": "x", "datatype": "FP32", "shape": [1, 64], "data": [0.0] * 64}


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


# Health, metadata, metrics and keys


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
