"""What a model takes and gives, as the protocol and Triton describe it."""

from typing import Any

from model_store.artifacts.manifest import Manifest, NumericColumn
from model_store.scores.classification import SCORE_NAMES
from model_store.scores.regression import MIXTURE_ERROR_NAMES, MIXTURE_SCORE_NAMES
from service.integrations.open_inference.answers import CLASSES
from service.integrations.open_inference.requests import SAMPLES
from service.integrations.open_inference.rows import GROUPS, INPUT
from service.integrations.open_inference.tensors import BYTES

PLATFORM = "dubito"
Described = dict[str, Any]  # name, datatype and shape of a tensor; -1 is any length


def tensor(name: str, datatype: str, *shape: int) -> Described:
    """Return the description of a tensor with a row for each of the request's."""
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
    categories = manifest.categories
    is_by_group = categories is not None and categories.kind == "group"
    if is_by_group and all(column.name != GROUPS for column in spec.columns):
        inputs.append({**tensor(GROUPS, BYTES), "parameters": {"optional": True}})
    return inputs


def model_outputs(manifest: Manifest) -> list[Described]:
    """Return the tensors that a model gives, those that it gives on request at the end."""
    of_all = [tensor("flag", "BOOL"), tensor("p_value", "FP64"), tensor("num_samples", "INT64")]
    if manifest.categories is not None:
        of_all.append(tensor("category", BYTES))
    scores = SCORE_NAMES if manifest.classes is not None else MIXTURE_SCORE_NAMES
    for name in (*scores, *manifest.detectors.density):
        of_all += [
            tensor(f"detectors.{name}.score", "FP64"),
            tensor(f"detectors.{name}.fired", "BOOL"),
            tensor(f"detectors.{name}.p_value", "FP64"),
        ]
    if manifest.classes is not None:
        count = len(manifest.classes)
        own = [
            tensor("label", BYTES),
            tensor("probabilities", "FP64", count),
            tensor("prediction_set", "BOOL", count),
        ]
        own += [
            tensor(name, "FP64") for name in (*SCORE_NAMES, "expected_entropy", "bald_corrected")
        ]
        errors: tuple[str, ...] = SCORE_NAMES
        if manifest.abstention is not None:
            of_all.append(tensor("abstain", "BOOL"))
        on_request = [
            tensor(SAMPLES, "FP32", -1, count),
            {"name": CLASSES, "datatype": BYTES, "shape": [count]},
        ]
    else:
        own = [tensor(name, "FP64") for name in ("mean", *MIXTURE_SCORE_NAMES)]
        own += [tensor("interval", "FP64", 2)]
        own += [tensor("median", "FP64")] if manifest.transform is not None else []
        errors = MIXTURE_ERROR_NAMES
        on_request = [tensor(f"{SAMPLES}.mean", "FP32", -1), tensor(f"{SAMPLES}.std", "FP32", -1)]
    return [
        *own,
        *of_all,
        *(tensor(f"standard_error.{name}", "FP64") for name in errors),
        *on_request,
    ]


def model_metadata(manifest: Manifest, versions: list[str]) -> dict[str, Any]:
    """Return a model's description: what the protocol has, and its classes or its target."""
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
    """Return the same as Triton's configuration of a model, which has no axis of rows."""

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
