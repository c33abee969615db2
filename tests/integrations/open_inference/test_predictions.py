import base64
import gzip
import json
import zlib

import numpy as np
import pytest

from tests.support.open_inference import (
    HEADER,
    PEOPLE,
    PICTURE,
    assert_same,
    binary_tensor,
    encode_elements,
    get_arrays,
    get_binary_arrays,
    get_error,
    infer,
    post,
    predict,
    string_tensor,
    tensor,
)
from tests.support.tiny import GROUPS


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
