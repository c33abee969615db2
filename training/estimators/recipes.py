"""From an estimator's rows, kept as a file, and its parameters to a recipe."""

import io
import operator
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from jaxtyping import Shaped

from model_store.inference.frames import to_parquet
from model_store.types import Task
from training import log
from training.data.findings import inspect_source
from training.data.plan import SPLITS, make_plan
from training.networks import registry
from training.recipe import DataSection, Recipe, validate

NAMES: dict[Task, str] = {"classification": "classifier", "regression": "regressor"}
SECTIONS = ("posterior", "training", "likelihood", "serving")
HELD_OUT = ("test_fraction", *SPLITS, *(f"{split}_rows" for split in SPLITS))
OF_TEXT = ("text", "tokenizer", "max_tokens", "pad_token")
NAMING_NETWORKS = {"hidden", "kind", "factory"}
OF_ANY_METHOD = ("batch_rows", "max_epochs")  # of a plan's [training]
OF_ENDING = ("early_stopping", "refit", "max_epochs", "patience")  # not of told epochs
AFTER_TRAINING = "laplace"  # of a network that was trained already


def make_recipe(
    task: Task, parameters: Mapping[str, Any], section: DataSection, folder: Path
) -> Recipe:
    """Return the recipe that follows from rows in a folder, but for what parameters say."""
    seed = operator.index(parameters["random_state"])
    without_text = {key: DataSection.model_fields[key].default for key in OF_TEXT}
    plain = section.model_copy(update={**dict.fromkeys(HELD_OUT), **without_text})
    plan = make_plan(inspect_source(section, folder, task), plain, NAMES[task], seed)
    for warning in plan.warnings:
        log.warning("%s", warning)
    content = plan.recipe.model_dump(exclude_unset=True)
    method, network = parameters["method"], parameters["network"]
    if parameters["start"] is not None:
        method = method or AFTER_TRAINING
        factory = registry.register(parameters["start"])
        network = {"factory": factory, "start": "trained", **(network or {})}
    if method not in (None, content["method"]):
        training = {key: content["training"][key] for key in OF_ANY_METHOD}
        content |= {"method": method, "posterior": {}, "training": training}
    if network is not None:
        is_whole = NAMING_NETWORKS & network.keys()
        content["network"] = {**({} if is_whole else content["network"]), **network}
    told = section.model_dump(exclude_unset=True, include={*HELD_OUT})
    for split in SPLITS:
        if {split, f"{split}_rows"} & told.keys():
            del content["data"][split]
    content["data"] |= told
    if section.text is not None:
        content["data"] |= section.model_dump(include={*OF_TEXT, "columns"})
    if {"epochs", "choose"} & (parameters["training"] or {}).keys():
        kept = content.get("training", {}).items()
        content["training"] = {key: value for key, value in kept if key not in OF_ENDING}
    for key in SECTIONS:
        joined = {**content.get(key, {}), **(parameters[key] or {})}
        content |= {key: joined} if joined else {}
    return validate(content, NAMES[task].capitalize())


def write_table(
    table: pa.Table,
    y: Shaped[np.ndarray, "N"],
    target: object,
    kinds: Mapping[str, str],
    given: Mapping[str, Any],
    folder: Path,
) -> DataSection:
    """Write a table and its targets to a folder, and return the `[data]` that names them, with what
    else is given of it."""
    names = table.column_names
    called = target if isinstance(target, str) and target not in names else "y"
    while called in names:
        called += "_"
    content = to_parquet(table.append_column(called, pa.array(y)))
    file = f"rows-{sha256(content).hexdigest()[:16]}.parquet"
    columns = {**kinds, **given.get("columns", {})}
    section = {**given, "source": f"parquet:{file}", "target": called, "columns": columns}
    return _keep(content, section, folder / file)


def write_arrays(
    x: Shaped[np.ndarray, "N ..."],
    y: Shaped[np.ndarray, "N"],
    given: Mapping[str, Any],
    folder: Path,
) -> DataSection:
    content = io.BytesIO()
    np.savez(content, x=x, y=y)
    digest = sha256(np.ascontiguousarray(x).data)
    digest.update(repr((x.shape, x.dtype, y.tolist())).encode())
    file = f"rows-{digest.hexdigest()[:16]}.npz"
    return _keep(content.getvalue(), {**given, "source": f"npz:{file}"}, folder / file)


def _keep(content: bytes, section: dict[str, Any], path: Path) -> DataSection:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return DataSection.model_validate(section)
