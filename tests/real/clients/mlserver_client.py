"""Call the service with MLServer's codecs: `python mlserver_client.py URL FOLDER`. Prints JSON.

FOLDER contains `digits.npy` and `picture.png`.
"""

import json
import sys
from pathlib import Path

import httpx
import numpy as np
import pandas
from mlserver.codecs import Base64Codec, NumpyCodec, NumpyRequestCodec, PandasCodec, StringCodec
from mlserver.types import (
    InferenceErrorResponse,
    InferenceRequest,
    InferenceResponse,
    MetadataModelResponse,
    MetadataServerResponse,
    Parameters,
    RepositoryIndexResponse,
)

url, folder = sys.argv[1], Path(sys.argv[2])
DIGITS = np.load(folder / "digits.npy")


def add_seed_and_id(request):
    request.parameters = Parameters.model_validate(
        {**(request.parameters or Parameters()).model_dump(), "seed": 7}
    )
    request.id = "a request"
    return request


def post(model, request):
    content = add_seed_and_id(request).model_dump_json(exclude_none=True)
    return httpx.post(f"{url}/v2/models/{model}/infer", content=content, timeout=60)


def to_list(output):
    codec = StringCodec if output.datatype == "BYTES" else NumpyCodec
    return np.asarray(codec.decode_output(output)).ravel().tolist()


def infer(model, request):
    answer = post(model, request)
    assert answer.status_code == 200, answer.text
    response = InferenceResponse.model_validate_json(answer.content)
    outputs = {output.name: to_list(output) for output in response.outputs}
    metadata = {
        "id": response.id,
        "model_name": response.model_name,
        "parameters": response.parameters.model_dump(),
    }
    return {**metadata, **outputs}


def wrap(item):
    return InferenceRequest(inputs=[item])


def get_error(model, request):
    answer = post(model, request)
    return [answer.status_code, InferenceErrorResponse.model_validate_json(answer.content).error]


picture = (folder / "picture.png").read_bytes()
text = ["good film", "bad day"]
table = pandas.DataFrame({"age": [31.0, np.nan], "city": ["Rome", "Oslo"]})
missing = pandas.DataFrame({"age": [31.0, np.nan], "city": ["Rome", ""]})
MetadataServerResponse.model_validate_json(httpx.get(f"{url}/v2").content)
MetadataModelResponse.model_validate_json(httpx.get(f"{url}/v2/models/digits").content)
RepositoryIndexResponse.model_validate_json(
    httpx.post(f"{url}/v2/repository/index", content=b"{}").content
)
answers = {
    "digits": infer("digits", NumpyRequestCodec.encode_request(DIGITS)),
    "digits_input": infer("digits", wrap(NumpyCodec.encode_input("inputs", DIGITS.astype(int)))),
    "pictures": infer(
        "pictures", wrap(Base64Codec.encode_input("inputs", [picture] * 2, use_bytes=False))
    ),
    "texts": infer("texts", wrap(StringCodec.encode_input("inputs", text, use_bytes=False))),
    "people": infer("people", PandasCodec.encode_request(missing, use_bytes=False)),
    "rents": infer("rents", PandasCodec.encode_request(missing, use_bytes=False)),
    "others": infer("people", PandasCodec.encode_request(table, use_bytes=False)),
    "unknown_model": get_error("nothing", NumpyRequestCodec.encode_request(DIGITS)),
    "wrong_shape": get_error("digits", NumpyRequestCodec.encode_request(DIGITS[:, :63])),
}
print(json.dumps(answers))
