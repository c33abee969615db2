"""Answers of the Open Inference Protocol, and descriptions of models.

An answer has a tensor for each array, in JSON or after it as bytes.
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
from integrations.open_inference.tensors import BYTES, bytes_of, datatype_of
from model_store.artifacts.manifest import Manifest, NumericColumn
from model_store.errors import InvalidInput
from model_store.scores.classification import Scores
from model_store.scores.regression import MIXTURE_SCORE_NAMES, MixtureScores
from model_store.scores.tasks import DETECTED
from model_store.types import Pause, Task
from service.api.fields import CLASSES as FIELD_CLASSES
from service.api.fields import DRAWS, Field
from service.api.predictions import BY_TASK
from service.api.responses import NUMBERS_AT_ONCE, Answer, rates_of

PLATFORM = "dubito"
CLASSES = "classes"  # of `probabilities`, only on request
# The first outputs of an answer
FIRST = (
    *("label", "probabilities", "mean", "std", "interval", "flag", "p_value", "prediction_set"),
    "abstain",
)
# The first outputs of a model's description
DESCRIBED = (
    *("label", "probabilities", "prediction_set", "mean", *Scores.error_names, "expected_entropy"),
    *("bald_corrected", *MIXTURE_SCORE_NAMES, "interval", "median", "flag", "p_value"),
    *("num_samples", "category", "detectors", "abstain", "standard_error"),
)
# By field; the others are FP64
DATATYPES = {
    **dict.fromkeys(("label", "category"), BYTES),
    **dict.fromkeys(("flag", "prediction_set", "abstain"), "BOOL"),
    "num_samples": "INT64",
    "samples": "FP32",
}
# Fields that only some models have
IS_GIVEN: dict[str, Callable[[Manifest], bool]] = {
    "median": lambda manifest: manifest.transform is not None,
    "category": lambda manifest: manifest.categories is not None,
    "abstain": lambda manifest: manifest.abstention is not None,
    "explanation": lambda _: False,
}
ERROR_NAMES: dict[Task, tuple[str, ...]] = {
    "classification": Scores.error_names,
    "regression": MixtureScores.error_names,
}
Described = dict[str, Any]  # name, datatype and shape of a tensor; -1 is any length


class TensorEncoder:
    """Writes the answer to one request. It sets `header_length` if tensors are bytes."""

    def __init__(self, asked: InferRequest, request_id: str) -> None:
        self.asked = asked
        self.request_id = asked.id or request_id
        self.header_length: int | None = None

    def __call__(self, answer: Answer, pause: Pause) -> list[bytes]:
        manifest, arrays, wanted = answer.results.manifest, answer.arrays(), self.asked.outputs
        if wanted is None:
            first = [name for name in FIRST if name in arrays]
            wanted = dict.fromkeys([*first, *arrays])
        elif manifest.classes is not None and CLASSES in wanted:
            arrays[CLASSES] = np.array(manifest.classes)
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
        text, contents = [orjson.dumps(head)[:-1], b',"outputs":['], list[bytes]()
        for i, (name, as_bytes) in enumerate(wanted.items()):
            array, before = arrays[name], b"," if i else b""
            about = {"name": name, "datatype": datatype_of(array), "shape": array.shape}
            if self.asked.binary_output if as_bytes is None else as_bytes:
                contents.append(bytes_of(array))
                size = {"binary_data_size": len(contents[-1])}
                text += [before, orjson.dumps({**about, "parameters": size})]
            else:
                text += [before, orjson.dumps(about)[:-1], b',"data":[']
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


def parameters_of(answer: Answer) -> dict[str, Any]:
    """Return the fields for all rows: numbers, or JSON as strings, without nulls."""
    options, unknown = answer.options, answer.unknown
    said = {
        "seed": answer.seed,
        "num_samples": answer.results.num_samples,
        **rates_of(options),
        "priors": None if options.priors is None else orjson.dumps(options.priors).decode(),
        "unknown_categories": orjson.dumps(unknown).decode() if unknown else None,
    }
    return {name: value for name, value in said.items() if value is not None}


def _json_parts(flat: np.ndarray, pause: Pause) -> Iterator[bytes]:
    """Yield elements as JSON with commas between; infinite numbers are null."""
    for first in range(0, len(flat), NUMBERS_AT_ONCE):
        part: Any = flat[first : first + NUMBERS_AT_ONCE]
        part = part.tolist() if flat.dtype.kind == "U" else np.ascontiguousarray(part)
        yield b"," if first else b""
        yield orjson.dumps(part, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]
        if len(flat) > NUMBERS_AT_ONCE:
            pause()


def tensor(name: str, datatype: str, *shape: int) -> Described:
    return {"name": name, "datatype": datatype, "shape": [-1, *shape]}


def model_inputs(manifest: Manifest) -> list[Described]:
    """Describe a model's input tensors. Image models also take files, and text models ids."""
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


def model_outputs(manifest: Manifest) -> list[Described]:
    order = {name: place for place, name in enumerate(DESCRIBED)}
    fields = sorted(BY_TASK[manifest.task], key=lambda f: order.get(f.name, len(order)))
    return [
        output
        for field in fields
        if field.name not in IS_GIVEN or IS_GIVEN[field.name](manifest)
        for output in _field_outputs(field, manifest)
    ]


def _field_outputs(field: Field, manifest: Manifest) -> Iterator[Described]:
    """Yield the tensors of a field: several for those that are keyed by name."""
    lengths = {FIELD_CLASSES: len(manifest.classes or ()), DRAWS: -1}
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
            yield tensor(f"{field.name}.mean", datatype, *shape)
            yield tensor(f"{field.name}.std", datatype, *shape)
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
    """Return a model's description in Triton's form, which has no axis of rows."""

    def triton(described: Described) -> Described:
        datatype = "STRING" if described["datatype"] == BYTES else described["datatype"]
        dims = described["shape"][1:] or [1]
        return {"name": described["name"], "data_type": f"TYPE_{datatype}", "dims": dims}

    return {
        "name": manifest.name,
        "platform": PLATFORM,
        "backend": PLATFORM,
        "max_batch_size": max_rows,
        "input": [triton(described) for described in model_inputs(manifest)],
        "output": [triton(described) for described in model_outputs(manifest)],
    }
