"""Call the service with KServe's client: `python kserve_client.py URL FOLDER`. Prints JSON.

FOLDER contains `digits.npy` and `picture.png`.
"""

import asyncio
import json
import sys
from pathlib import Path

import httpx
import numpy as np
from kserve import InferenceRESTClient, InferInput, InferRequest, RESTConfig

url, folder = sys.argv[1], Path(sys.argv[2])
DIGITS = np.load(folder / "digits.npy")


def to_list(values):
    return [
        item.decode() if isinstance(item, bytes) else item
        for item in np.asarray(values).ravel().tolist()
    ]


def tensor(name, array, datatype, binary):
    created = InferInput(name, list(array.shape), datatype)
    created.set_data_from_numpy(array, binary_data=binary)
    return created


async def infer(client, model, inputs, request_id="a request", **options):
    request = InferRequest(
        model,
        inputs,
        request_id=request_id,
        parameters={"seed": 7, **options.pop("parameters", {})},
        **options,
    )
    answer = await client.infer(url, request, model_name=model)
    outputs = {output.name: to_list(output.as_numpy()) for output in answer.outputs}
    return {
        "id": answer.id,
        "model_name": answer.model_name,
        "parameters": answer.parameters,
        **outputs,
    }


async def get_error(client, *arguments):
    try:
        await infer(client, *arguments)
    except httpx.HTTPStatusError as error:
        return [error.response.status_code, str(error)]


async def main():
    client = InferenceRESTClient(RESTConfig(protocol="v2", timeout=60))
    picture = np.array([(folder / "picture.png").read_bytes()] * 2, dtype=object)
    text = np.array([b"good film", b"bad day"], dtype=object)

    def table(binary):
        age, city = np.array([31.0, np.nan]), np.array([b"Rome", b""], dtype=object)
        return [tensor("age", age, "FP64", binary), tensor("city", city, "BYTES", binary)]

    answers = {
        "live": await client.is_server_live(url),
        "ready": await client.is_server_ready(url),
        "model_ready": await client.is_model_ready(url, "digits"),
        "none_ready": await client.is_model_ready(url, "nothing"),
        "digits": await infer(client, "digits", [tensor("inputs", DIGITS, "FP32", True)]),
        "digits_json": await infer(
            client, "digits", [tensor("inputs", DIGITS, "FP32", False)], request_id=None
        ),
        "digits_binary": await infer(
            client,
            "digits",
            [tensor("inputs", DIGITS, "FP32", True)],
            parameters={"binary_data_output": True},
        ),
        "pictures": await infer(client, "pictures", [tensor("inputs", picture, "BYTES", True)]),
        "texts": await infer(client, "texts", [tensor("inputs", text, "BYTES", True)]),
        "texts_json": await infer(client, "texts", [tensor("inputs", text, "BYTES", False)]),
        "people": await infer(client, "people", table(True)),
        "rents": await infer(client, "rents", table(True)),
        "unknown_model": await get_error(
            client, "nothing", [tensor("inputs", DIGITS, "FP32", True)]
        ),
        "wrong_shape": await get_error(
            client, "digits", [tensor("inputs", DIGITS[:, :63], "FP32", True)]
        ),
    }
    forwarded = {
        "id": "step",
        "model_name": "before",
        "outputs": [
            {
                "name": "scaled",
                "datatype": "FP32",
                "shape": list(DIGITS.shape),
                "data": DIGITS.ravel().tolist(),
            }
        ],
    }
    answer = await client.infer(f"{url}/v2/models/digits/infer", forwarded, is_graph_endpoint=True)
    answers["graph"] = [answer["id"], len(answer["outputs"][0]["data"])]
    print(json.dumps(answers))
    await client.close()


asyncio.run(main())
