"""Answers of the Open Inference Protocol: a tensor for each array of an answer, in JSON or after it
as bytes."""

from typing import Any

import numpy as np
import orjson
from jaxtyping import Bool, Int64

from model_store.errors import InvalidInput
from model_store.scores.classification import Scores
from model_store.sources.columns import unknown_categories
from service.api.responses import NUMBERS_AT_ONCE, judged_by, row_arrays
from service.call import Call
from service.engine.decision import DecisionOptions, decide
from service.engine.jobs import Job, Predicted
from service.integrations.open_inference.requests import HEADER_LENGTH, SAMPLES, InferRequest
from service.integrations.open_inference.tensors import bytes_of, datatype_of
from service.predicting import ToExplain

CLASSES = (
    "classes"  # the names of probabilities' columns: the same for all rows, so on request alone
)
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


class AsTensors:
    """How the answer to one request is written. `header_length` is known once it is, where tensors
    are bytes."""

    as_arrays = False  # tensors in JSON take as much as any

    def __init__(self, asked: InferRequest, request_id: str) -> None:
        """Begin; an answer has the id of its request, or `request_id` where that has none."""
        self.asked = asked
        self.request_id = asked.id or request_id
        self.header_length: int | None = None

    def write(
        self,
        job: Job,
        predicted: Predicted,
        options: DecisionOptions,
        groups: Int64[np.ndarray, "N"] | None,
        _: ToExplain | None,
    ) -> tuple[list[bytes], Bool[np.ndarray, "N"]]:
        """Return an answer.

        Raises:
            InvalidInput: naming an output that there is none of.
        """
        prediction = (
            predicted.prediction if groups is None else predicted.prediction.of_groups(groups)
        )
        decision = decide(prediction, options)
        manifest = job.served.model.manifest
        arrays = dict(row_arrays(manifest, prediction, decision, predicted.num_samples))
        on_request: dict[str, np.ndarray] = {}
        if manifest.classes is not None and self._wants(CLASSES):
            on_request[CLASSES] = np.array(manifest.classes)
        if predicted.samples is not None:
            samples = predicted.samples.transpose(1, 0, 2)
            if isinstance(prediction.scores, Scores):
                on_request[SAMPLES] = samples
            else:
                on_request |= {
                    f"{SAMPLES}.mean": samples[..., 0],
                    f"{SAMPLES}.std": samples[..., 1],
                }
        arrays |= on_request
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
        unknown = unknown_categories(job.x, manifest.input.columns)
        head = {
            "model_name": job.served.name,
            "model_version": job.served.version,
            "id": self.request_id,
            "parameters": parameters_of(predicted, options, unknown),
        }
        parts = self._parts(
            job.call, head, {name: (arrays[name], as_bytes) for name, as_bytes in wanted.items()}
        )
        return parts, decision.flag

    def _wants(self, name: str) -> bool:
        return self.asked.outputs is not None and name in self.asked.outputs

    def _parts(
        self, call: Call, head: dict[str, Any], outputs: dict[str, tuple[np.ndarray, bool | None]]
    ) -> list[bytes]:
        """Return an answer in parts: its JSON, and then the tensors that are wanted as bytes."""
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
                        call.pause()
                text.append(b"]}")
        text.append(b"]}")
        header = b"".join(text)
        if not has_bytes:
            return [header]
        self.header_length = len(header)
        if sum(map(len, contents)) > NUMBERS_AT_ONCE:
            call.pause()
        return [b"".join([header, *contents])]

    @property
    def headers(self) -> dict[str, str]:
        """The headers of an answer that was written."""
        return {} if self.header_length is None else {HEADER_LENGTH: str(self.header_length)}


def parameters_of(
    predicted: Predicted, options: DecisionOptions, unknown: dict[str, int]
) -> dict[str, Any]:
    """Return what an answer says of all rows: numbers, or JSON as strings. What does not apply is
    left out."""
    settle = None if options.rule is None else options.rule.tolerance
    said = {
        "seed": predicted.seed,
        "num_samples": predicted.num_samples,
        **judged_by(options),
        "settle": settle,
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
