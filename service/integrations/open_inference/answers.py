"""Answers of the Open Inference Protocol, and what they will hold: models' descriptions.

An answer has a tensor for each array, in JSON or after it as bytes.
"""

from typing import Any

import numpy as np
import orjson

from model_store.artifacts.manifest import Manifest, NumericColumn
from model_store.errors import InvalidInput
from model_store.scores.classification import Scores
from model_store.scores.regression import MIXTURE_SCORE_NAMES
from model_store.types import Pause
from service.api.predictions import BY_TASK
from service.api.responses import NUMBERS_AT_ONCE, Answer, judged_by
from service.integrations.open_inference.requests import (
    GROUPS,
    HEADER_LENGTH,
    INPUT,
    InferRequest,
    is_by_group,
)
from service.integrations.open_inference.tensors import BYTES, bytes_of, datatype_of

PLATFORM = "dubito"
CLASSES = "classes"  # of `probabilities`: the same for all rows, so on request alone
# What people look at first comes first.
FIRST = (
    "label",
    "probabilities",
    "mean",
    "std",
    "interval",
    "flag",
    "p_value",
    "prediction_set",
    "abstain",
)
# The order of a model's description; what is not named here comes last.
DESCRIBED = (
    "label",
    "probabilities",
    "prediction_set",
    "mean",
    *Scores.error_names,
    "expected_entropy",
    "bald_corrected",
    *MIXTURE_SCORE_NAMES,
    "interval",
    "median",
    "flag",
    "p_value",
    "num_samples",
    "category",
    "detectors",
    "abstain",
    "standard_error",
)
Described = dict[str, Any]  # name, datatype and shape of a tensor; -1 is any length


class TensorEncoder:
    """Writes the answer to one request. `header_length` is known once it is written, where tensors
    are bytes."""

    def __init__(self, asked: InferRequest, request_id: str) -> None:
        self.asked = asked
        self.request_id = asked.id or request_id
        self.header_length: int | None = None

    def __call__(self, answer: Answer, pause: Pause) -> list[bytes]:
        manifest, arrays = answer.results.manifest, answer.arrays()
        if manifest.classes is not None and self._wants(CLASSES):
            arrays[CLASSES] = np.array(manifest.classes)
        outputs = self.asked.outputs
        if outputs is None:
            names = [
                *(name for name in FIRST if name in arrays),
                *(name for name in arrays if name not in FIRST),
            ]
            wanted: dict[str, bool | None] = dict.fromkeys(names)
        else:
            wanted = outputs
            for n, name in enumerate(wanted):
                if name not in arrays:
                    expected = f"one of {', '.join(arrays)}, which this answer has"
                    raise InvalidInput(f"outputs.{n}.name", expected, "another")
        head = {
            "model_name": manifest.name,
            "model_version": manifest.version,
            "id": self.request_id,
            "parameters": parameters_of(answer),
        }
        return self._parts(
            head, {name: (arrays[name], as_bytes) for name, as_bytes in wanted.items()}, pause
        )

    def _wants(self, name: str) -> bool:
        return self.asked.outputs is not None and name in self.asked.outputs

    def _parts(
        self, head: dict[str, Any], outputs: dict[str, tuple[np.ndarray, bool | None]], pause: Pause
    ) -> list[bytes]:
        text = [orjson.dumps(head)[:-1], b',"outputs":[']
        contents: list[bytes] = []
        has_bytes = False
        for i, (name, (array, as_bytes)) in enumerate(outputs.items()):
            about: dict[str, Any] = {
                "name": name,
                "datatype": datatype_of(array),
                "shape": array.shape,
            }
            text += [b","] if i else []
            if self.asked.binary_output if as_bytes is None else as_bytes:
                has_bytes = True
                content = bytes_of(array)
                contents.append(content)
                text.append(
                    orjson.dumps({**about, "parameters": {"binary_data_size": len(content)}})
                )
            else:
                text += [orjson.dumps(about)[:-1], b',"data":[']
                flat = array.ravel()
                for first in range(0, len(flat), NUMBERS_AT_ONCE):
                    text += [b","] if first else []
                    text.append(_json_items(flat[first : first + NUMBERS_AT_ONCE]))
                    if len(flat) > NUMBERS_AT_ONCE:
                        pause()
                text.append(b"]}")
        text.append(b"]}")
        header = b"".join(text)
        if not has_bytes:
            return [header]
        self.header_length = len(header)
        if sum(map(len, contents)) > NUMBERS_AT_ONCE:
            pause()
        return [b"".join([header, *contents])]

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.header_length is None else {HEADER_LENGTH: str(self.header_length)}


def parameters_of(answer: Answer) -> dict[str, Any]:
    """Return what an answer says of all rows: numbers, or JSON as strings. What does not apply is
    left out."""
    options, unknown = answer.options, answer.unknown
    said = {
        "seed": answer.seed,
        "num_samples": answer.results.num_samples,
        **judged_by(options),
        "settle": None if options.rule is None else options.rule.tolerance,
    }
    parameters: dict[str, Any] = {name: value for name, value in said.items() if value is not None}
    if options.priors is not None:
        parameters["priors"] = orjson.dumps(options.priors).decode()
    if unknown:
        parameters["unknown_categories"] = orjson.dumps(unknown).decode()
    return parameters


def _json_items(flat: np.ndarray) -> bytes:
    """Return elements as JSON, with commas between; what is infinite is null."""
    if flat.dtype.kind == "U":
        return orjson.dumps(flat.tolist())[1:-1]
    return orjson.dumps(np.ascontiguousarray(flat), option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]


def tensor(name: str, datatype: str, *shape: int) -> Described:
    return {"name": name, "datatype": datatype, "shape": [-1, *shape]}


def model_inputs(manifest: Manifest) -> list[Described]:
    """Return the tensors that a model takes. A model of images also takes files, and one of text
    also ids."""
    spec = manifest.input
    if spec.columns:
        inputs = []
        for column in spec.columns:
            is_number = isinstance(column, NumericColumn)
            inputs.append(tensor(column.name, "FP64" if is_number else BYTES))
    elif spec.text is not None:
        inputs = [tensor(INPUT, BYTES)]
    else:
        inputs = [tensor(INPUT, "INT32" if spec.takes_ids else "FP32", *spec.shape)]
    if is_by_group(manifest):
        inputs.append({**tensor(GROUPS, BYTES), "parameters": {"optional": True}})
    return inputs


def model_outputs(manifest: Manifest) -> list[Described]:
    last = len(DESCRIBED)
    order = {name: place for place, name in enumerate(DESCRIBED)}
    fields = sorted(BY_TASK[manifest.task], key=lambda field: order.get(field.name, last))
    outputs = [
        tensor(name, datatype, *shape)
        for field in fields
        for name, datatype, shape in field.tensors(manifest)
    ]
    if manifest.classes is not None:
        outputs.append({"name": CLASSES, "datatype": BYTES, "shape": [len(manifest.classes)]})
    return outputs


def model_metadata(manifest: Manifest, versions: list[str]) -> dict[str, Any]:
    about = (
        {"target": manifest.target} if manifest.classes is None else {"classes": manifest.classes}
    )
    return {
        "name": manifest.name,
        "versions": versions,
        "platform": PLATFORM,
        "inputs": model_inputs(manifest),
        "outputs": model_outputs(manifest),
        "parameters": {"method": manifest.method, "task": manifest.task},
        **about,
    }


def triton_config(manifest: Manifest, max_rows: int) -> dict[str, Any]:
    def triton(described: Described, type_field: str = "data_type") -> Described:
        datatype = "STRING" if described["datatype"] == BYTES else described["datatype"]
        return {
            "name": described["name"],
            type_field: f"TYPE_{datatype}",
            "dims": described["shape"][1:] or [1],
        }

    return {
        "name": manifest.name,
        "platform": PLATFORM,
        "backend": PLATFORM,
        "max_batch_size": max_rows,
        "input": [triton(described) for described in model_inputs(manifest)],
        "output": [
            triton(described)
            for described in model_outputs(manifest)
            if described["name"] != CLASSES
        ],
    }
