"""Convert an estimator's parameters and rows to a recipe and a data file."""

import io
import numbers
import warnings
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from jaxtyping import Float64, Shaped
from sklearn.utils import check_random_state

from model_store.errors import InvalidInput
from model_store.inference.frames import is_frame, to_table
from model_store.sources.parquet import to_parquet
from model_store.types import Task
from training import log
from training.data.column_findings import CONFIGURED
from training.data.findings import MAX_SHOWN, Findings, inspect_source
from training.data.plan import SPLITS, make_plan
from training.data.rows import default_test_fraction
from training.networks import registry
from training.recipe import Recipe, validate
from training.sections import DataSection

NAMES: dict[Task, str] = {"classification": "classifier", "regression": "regressor"}
SECTIONS = ("posterior", "training", "likelihood", "serving")
ROW_KEYS = ("source", "target")  # keys of [data] that X and y determine
HELD_OUT = ("test_fraction", *SPLITS)
TEST_FRACTION, MIN_TEST_ROWS = 0.05, 50  # less than by default, because users often have test rows
TEXT_KEYS = ("text", "tokenizer", "max_tokens")
ARCHITECTURE_KEYS = {"hidden", "kind", "factory"}
COMMON_TRAINING_KEYS = ("batch_rows", "max_epochs")  # for all methods
STOPPING_KEYS = ("early_stopping", "max_epochs", "patience")  # conflict with `epochs`
TRAINED_METHOD = "laplace"  # default for trained networks


def make_recipe(
    task: Task, parameters: Mapping[str, Any], section: DataSection, folder: Path
) -> Recipe:
    """Plan a recipe for the rows in a folder, and apply the estimator's parameters."""
    seed = _seed(parameters["random_state"])
    without_text = {key: DataSection.model_fields[key].default for key in TEXT_KEYS}
    findings = inspect_source(section, folder, task)
    if section.test_fraction is None and section.group is None:  # small splits may fit no group
        fraction = max(TEST_FRACTION, MIN_TEST_ROWS / findings.rows)
        fraction = min(fraction, default_test_fraction(findings.rows))
        section = section.model_copy(update={"test_fraction": fraction})
    plain = section.model_copy(update={**dict.fromkeys(SPLITS), **without_text})
    _warn_ignored(findings)
    plan = make_plan(findings, plain, NAMES[task], seed)
    notes = [
        f"column {column.name}: {note}"
        for column in findings.used
        if column.kind == "categorical"
        for note in column.notes
    ]
    for warning in [*notes, *findings.warnings, *plan.warnings]:
        log.warning("%s", warning)
    content = plan.recipe.model_dump(exclude_unset=True)
    method, network = parameters["method"], parameters["network"]
    if parameters["start"] is not None:
        method = method or TRAINED_METHOD
        factory = registry.register(parameters["start"])
        network = {"factory": factory, "start": "trained", **(network or {})}
    if method not in (None, content["method"]):
        training = {key: content["training"][key] for key in COMMON_TRAINING_KEYS}
        content |= {"method": method, "posterior": {}, "training": training}
    if network is not None:
        is_complete = ARCHITECTURE_KEYS & network.keys()
        content["network"] = {**({} if is_complete else content["network"]), **network}
    content["data"] |= section.model_dump(exclude_unset=True, include={*HELD_OUT})
    if section.text is not None:
        content["data"] |= section.model_dump(include={*TEXT_KEYS, "columns"})
    if {"epochs", "choose"} & (parameters["training"] or {}).keys():
        training = content.get("training", {}).items()
        content["training"] = {key: value for key, value in training if key not in STOPPING_KEYS}
    for key in SECTIONS:
        merged = {**content.get(key, {}), **(parameters[key] or {})}
        content |= {key: merged} if merged else {}
    return validate(content, NAMES[task].capitalize())


def _seed(random_state: Any) -> int:
    if isinstance(random_state, numbers.Integral):
        return int(random_state)
    return int(check_random_state(random_state).randint(2**31))


def _warn_ignored(findings: Findings) -> None:
    columns = [c for c in findings.columns if c.kind == "ignored" and c.reason != CONFIGURED]
    if columns:
        listed = "; ".join(
            f"{column.name} ({'. '.join([column.reason, *column.notes])})"
            for column in columns[:MAX_SHOWN]
        )
        rest = f" and {len(columns) - MAX_SHOWN} more" if len(columns) > MAX_SHOWN else ""
        message = (
            f"ignoring columns {listed}{rest}; to use one, convert it or set its kind, such as "
            f'data={{"columns": {{{columns[0].name!r}: "categorical"}}}}'
        )
        log.info("%s", message)
        warnings.warn(message, UserWarning, stacklevel=4)


def write_rows(
    X: Any,
    y: Shaped[np.ndarray, "N"],
    target: object,
    names: list[str] | None,
    parameters: Mapping[str, Any],
    folder: Path,
    weights: Float64[np.ndarray, "N"] | None = None,
) -> DataSection:
    """Write rows to a file, and return the `[data]` section that reads it."""
    data = {**(parameters["data"] or {})}
    if "tokenizer" in data:
        data["tokenizer"] = str(Path(data["tokenizer"]).absolute())
    for key in ROW_KEYS:
        if key in data:
            expected = "no value, because X and y determine it"
            raise InvalidInput(f"data.{key}", expected, repr(data[key]))
    if not is_frame(X) and (X.ndim > 2 or parameters["start"] is not None):
        if weights is not None:
            raise InvalidInput("sample_weight", "none, because the rows are no table", "some")
        buffer = io.BytesIO()
        np.savez(buffer, x=X, y=y)
        digest = sha256(np.ascontiguousarray(X).data)
        digest.update(repr((X.shape, X.dtype, y.tolist())).encode())
        file = f"rows-{digest.hexdigest()[:16]}.npz"
        return _write(buffer.getvalue(), {**data, "source": f"npz:{file}"}, folder / file)
    table = to_table(X, names)
    kinds = {} if is_frame(X) else dict.fromkeys(table.column_names, "numeric")
    target_name = target if isinstance(target, str) and target not in table.column_names else "y"
    target_name = _unused(target_name, table)
    table = table.append_column(target_name, pa.array(y))
    if weights is not None:
        data["weight"] = _unused("sample_weight", table)
        table = table.append_column(data["weight"], pa.array(weights))
    content = to_parquet(table)
    file = f"rows-{sha256(content).hexdigest()[:16]}.parquet"
    columns = {**kinds, **data.get("columns", {})}
    section = {**data, "source": f"parquet:{file}", "target": target_name, "columns": columns}
    return _write(content, section, folder / file)


def _unused(name: str, table: pa.Table) -> str:
    while name in table.column_names:
        name += "_"
    return name


def _write(content: bytes, section: dict[str, Any], path: Path) -> DataSection:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return DataSection.model_validate(section)
