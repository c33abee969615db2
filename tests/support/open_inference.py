"""Requests and responses of the Open Inference Protocol."""

import io
import json
import struct

import numpy as np

from tests.support.images import pixel

HEADER = "Inference-Header-Content-Length"
ROW = {"name": "x", "datatype": "FP32", "shape": [1, 64], "data": [0.0] * 64}
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
