"""Call the service with tritonclient: `python triton.py HOST:PORT FOLDER`. Prints JSON.

FOLDER contains `digits.npy` and `picture.png`.
"""

import json
import sys
from pathlib import Path

import numpy as np
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

address, folder = sys.argv[1], Path(sys.argv[2])
client = triton.InferenceServerClient(address)
DIGITS = np.load(folder / "digits.npy")
TABLE = {"age": np.array([31.0, np.nan]), "city": np.array(["Rome", ""], dtype=object)}


def tensor(name, array, datatype, binary=True):
    created = triton.InferInput(name, list(array.shape), datatype)
    created.set_data_from_numpy(array, binary_data=binary)
    return created


def to_list(array):
    return [item.decode() if isinstance(item, bytes) else item for item in array.ravel().tolist()]


def infer(model, inputs, **options):
    result = client.infer(model, inputs, parameters={"seed": 7}, **options)
    answer = result.get_response()
    tensors = {
        output["name"]: to_list(result.as_numpy(output["name"])) for output in answer["outputs"]
    }
    binary = [output["name"] for output in answer["outputs"] if "data" not in output]
    return {
        **{k: answer[k] for k in ("id", "model_name", "model_version", "parameters")},
        **tensors,
        "binary": binary,
    }


def get_error(call, *arguments, **options):
    try:
        call(*arguments, **options)
    except InferenceServerException as error:
        return [error.status(), error.message()]


def digits(binary=True):
    return [tensor("inputs", DIGITS, "FP32", binary)]


def table():
    return [tensor("age", TABLE["age"], "FP64"), tensor("city", TABLE["city"], "BYTES")]


picture = np.array([(folder / "picture.png").read_bytes()] * 2, dtype=object)
text = np.array(["good film", "bad day"], dtype=object)
outputs = [
    triton.InferRequestedOutput("probabilities", binary_data=False),
    triton.InferRequestedOutput("label"),
    triton.InferRequestedOutput("samples"),
]
answers = {
    "live": client.is_server_live(),
    "ready": client.is_server_ready(),
    "model_ready": client.is_model_ready("digits", "1"),
    "none_ready": client.is_model_ready("nothing"),
    "server": client.get_server_metadata(),
    "model": client.get_model_metadata("digits"),
    "table_model": client.get_model_metadata("people", "latest"),
    "config": client.get_model_config("digits"),
    "index": client.get_model_repository_index(),
    "digits": infer("digits", digits(), request_id="a request", priority=1, sequence_id=3),
    "digits_json": infer("digits", digits(False)),
    "digits_gzip": infer("digits", digits(), request_compression_algorithm="gzip"),
    "digits_deflate": infer("digits", digits(), request_compression_algorithm="deflate"),
    "digits_version": infer(
        "digits", digits(), model_version="1", outputs=outputs, timeout=30_000_000
    ),
    "digits_half": infer("digits", [tensor("inputs", DIGITS.astype(np.float16), "FP16")]),
    "pictures": infer("pictures", [tensor("inputs", picture, "BYTES")]),
    "pictures_array": infer(
        "pictures", [tensor("inputs", np.full((2, 3, 1, 1), 128, dtype=np.uint8), "UINT8")]
    ),
    "texts": infer("texts", [tensor("inputs", text, "BYTES")]),
    "texts_json": infer("texts", [tensor("inputs", text.reshape(2, 1), "BYTES", False)]),
    "people": infer("people", table()),
    "rents": infer("rents", table()),
    "in_background": client.async_infer("digits", digits(), parameters={"seed": 7})
    .get_result()
    .as_numpy("label")
    .tolist()
    != [],
    "unknown_model": get_error(client.infer, "nothing", digits()),
    "wrong_shape": get_error(client.infer, "digits", [tensor("inputs", DIGITS[:, :63], "FP32")]),
    "wrong_parameter": get_error(client.infer, "digits", digits(), parameters={"fpr": 2.0}),
    "too_late": get_error(client.infer, "digits", digits(), timeout=1),
}
print(json.dumps(answers))
