"""Encode responses and model descriptions for the Open Inference Protocol.

An answer has a tensor for each array, in JSON or in binary format after the JSON.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import orjson

from integrations.open_inference.requests import (
    GROUPS,
    HEADER_LENGTH,
    INPUT,
    InferRequest,
    is_by_group,
)
from integrations.open_inference.tensors import BYTES, encode_array, get_datatype
from model_store.artifacts.manifest import Manifest, NumericColumn
from model_store.errors import InvalidInput
from model_store.scores.classification import Scores
from model_store.scores.regression import MIXTURE_SCORE_NAMES, MixtureScores
from model_store.scores.tasks import DETECTED
from model_store.types import Pause, Task
from service.api.fields import CLASSES as FIELD_CLASSES
from service.api.fields import COLUMNS, DRAWS, Field
from service.api.predictions import BY_TASK
from service.api.responses import NUMBERS_AT_ONCE, Answer, get_rates

PLATFORM = "dubito"
CLASSES = "classes"  # axis of `probabilities`, only on request
# Answers start with these outputs.
ANSWER_ORDER = (
    *("label", "probabilities", "mean", "std", "interval", "flag", "p_value", "prediction_set"),
    "abstain",
)
# Model descriptions start with these outputs.
DESCRIPTION_ORDER = (
    *("label", "probabilities", "prediction_set", "mean", *Scores.error_names, "expected_entropy"),
    *("bald_corrected", *MIXTURE_SCORE_NAMES, "interval", "median", "flag", "p_value"),
    *("num_samples", "category", "detectors", "abstain", "standard_error"),
)
# Other fields are FP64.
DATATYPES = {
    **dict.fromkeys(("label", "category"), BYTES),
    **dict.fromkeys(("flag", "prediction_set", "abstain", "missing"), "BOOL"),
    "num_samples": "INT64",
    "samples": "FP32",
}
# Fields that only some models have.
IS_AVAILABLE: dict[str, Callable[[Manifest], bool]] = {
    "median": lambda manifest: manifest.transform is not None,
    "category": lambda manifest: manifest.categories is not None,
    "abstain": lambda manifest: manifest.abstention is not None,
    "explanation": lambda _: False,
    "missing": lambda manifest: bool(manifest.input.columns),
}
ERROR_NAMES: dict[Task, tuple[str, ...]] = {
    "classification": Scores.error_names,
    "regression": MixtureScores.error_names,
}
TensorSpec = dict[str, Any]  # name, datatype, shape (-1: any length)


class TensorEncoder:
    """An encoder for the response to an inference request.

    Attributes:
        header_length: length of the JSON in bytes, set if tensors in binary format follow.
    """

    def __init__(self, request: InferRequest, request_id: str) -> None:
        self.request = request
        self.request_id = request.id or request_id
        self.header_length: int | None = None

    def __call__(self, answer: Answer, pause: Pause) -> list[bytes]:
        manifest, arrays, outputs = answer.results.manifest, answer.arrays(), self.request.outputs
        if outputs is None:
            first = [name for name in ANSWER_ORDER if name in arrays]
            outputs = dict.fromkeys([*first, *arrays])
        elif manifest.classes is not None and CLASSES in outputs:
            arrays[CLASSES] = np.array(manifest.classes)
        for n, name in enumerate(outputs):
            if name not in arrays:
                expected = f"one of this answer's outputs, {', '.join(arrays)}"
                raise InvalidInput(f"outputs.{n}.name", expected, "another")
        head = {
            "model_name": manifest.name,
            "model_version": manifest.version,
            "id": self.request_id,
            "parameters": make_parameters(answer),
        }
        text, contents = [orjson.dumps(head)[:-1], b',"outputs":['], list[bytes]()
        for i, (name, is_binary) in enumerate(outputs.items()):
            array, separator = arrays[name], b"," if i else b""
            metadata = {"name": name, "datatype": get_datatype(array), "shape": array.shape}
            if self.request.binary_output if is_binary is None else is_binary:
                contents.append(encode_array(array))
                size = {"binary_data_size": len(contents[-1])}
                text += [separator, orjson.dumps({**metadata, "parameters": size})]
            else:
                text += [separator, orjson.dumps(metadata)[:-1], b',"data":[']
                text += [*_json_parts(array.ravel(), pause), b"]}"]
        header = b"".join([*text, b"]}"])
        if not contents:
            return [header]
        self.header_length = len(header)
        if sum(map(len, contents)) > NUMBERS_AT_ONCE:
            pause()
        return [b"".join([header, *contents])]

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.header_length is None else {HEADER_LENGTH: str(self.header_length)}


def make_parameters(answer: Answer) -> dict[str, Any]:
    """Create a response's parameters from the fields that apply to all rows."""
    options, unknown = answer.options, answer.unknown
    parameters = {
        "seed": answer.seed,
        "num_samples": answer.results.num_samples,
        **get_rates(options),
        "priors": None if options.priors is None else orjson.dumps(options.priors).decode(),
        "unknown_categories": orjson.dumps(unknown).decode() if unknown else None,
    }
    return {name: value for name, value in parameters.items() if value is not None}


def _json_parts(flat: np.ndarray, pause: Pause) -> Iterator[bytes]:
    """Yield values as comma-separated JSON, with null for infinite numbers."""
    for first in range(0, len(flat), NUMBERS_AT_ONCE):
        part: Any = flat[first : first + NUMBERS_AT_ONCE]
        part = part.tolist() if flat.dtype.kind == "U" else np.ascontiguousarray(part)
        yield b"," if first else b""
        yield orjson.dumps(part, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]
        if len(flat) > NUMBERS_AT_ONCE:
            pause()


def tensor(name: str, datatype: str, *shape: int) -> TensorSpec:
    return {"name": name, "datatype": datatype, "shape": [-1, *shape]}


def model_inputs(manifest: Manifest) -> list[TensorSpec]:
    """Describe a model's input tensors."""
    spec = manifest.input
    if spec.columns:
        inputs = [
            tensor(column.name, "FP64" if isinstance(column, NumericColumn) else BYTES)
            for column in spec.columns
        ]
    elif spec.text is not None:
        inputs = [tensor(INPUT, BYTES)]
    else:
        inputs = [tensor(INPUT, "INT32" if spec.takes_ids else "FP32", *spec.shape)]
    if is_by_group(manifest):
        inputs.append({**tensor(GROUPS, BYTES), "parameters": {"optional": True}})
    return inputs


def model_outputs(manifest: Manifest) -> list[TensorSpec]:
    order = {name: index for index, name in enumerate(DESCRIPTION_ORDER)}
    fields = sorted(BY_TASK[manifest.task], key=lambda f: order.get(f.name, len(order)))
    return [
        output
        for field in fields
        if field.name not in IS_AVAILABLE or IS_AVAILABLE[field.name](manifest)
        for output in _field_outputs(field, manifest)
    ]


def _field_outputs(field: Field, manifest: Manifest) -> Iterator[TensorSpec]:
    """Describe a field's output tensors. A mapping has one tensor for each name."""
    lengths = {
        FIELD_CLASSES: len(manifest.classes or ()),
        COLUMNS: len(manifest.input.columns),
        DRAWS: -1,
    }
    shape = [lengths[axis] if isinstance(axis, str) else len(axis) for axis in field.axes]
    datatype = DATATYPES.get(field.name, "FP64")
    match field.name, manifest.task:
        case "standard_error", task:
            for name in ERROR_NAMES[task]:
                yield tensor(f"{field.name}.{name}", datatype)
        case "detectors", task:
            for name in (*DETECTED[task], *manifest.detectors.density):
                yield tensor(f"{field.name}.{name}.score", "FP64")
                yield tensor(f"{field.name}.{name}.fired", "BOOL")
                yield tensor(f"{field.name}.{name}.p_value", "FP64")
        case "samples", "regression":
            yield tensor(f"{field.name}.mean", datatype, shape[0])
            yield tensor(f"{field.name}.std", datatype, shape[0])
        case _:
            yield tensor(field.name, datatype, *shape)


def model_metadata(manifest: Manifest, versions: list[str]) -> dict[str, Any]:
    outputs, classes = model_outputs(manifest), manifest.classes
    if classes is not None:
        outputs.append({"name": CLASSES, "datatype": BYTES, "shape": [len(classes)]})
    return {
        "name": manifest.name,
        "versions": versions,
        "platform": PLATFORM,
        "inputs": model_inputs(manifest),
        "outputs": outputs,
        "parameters": {"method": manifest.method, "task": manifest.task},
        **({"target": manifest.target} if classes is None else {"classes": classes}),
    }


def triton_config(manifest: Manifest, max_rows: int) -> dict[str, Any]:
    """Describe a model in Triton's format, where shapes omit the batch dimension."""

    def convert(spec: TensorSpec) -> TensorSpec:
        datatype = "STRING" if spec["datatype"] == BYTES else spec["datatype"]
        dims = spec["shape"][1:] or [1]
        return {"name": spec["name"], "data_type": f"TYPE_{datatype}", "dims": dims}

    return {
        "name": manifest.name,
        "platform": PLATFORM,
        "backend": PLATFORM,
        "max_batch_size": max_rows,
        "input": [convert(spec) for spec in model_inputs(manifest)],
        "output": [convert(spec) for spec in model_outputs(manifest)],
    }
