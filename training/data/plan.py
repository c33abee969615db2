"""Plan a default recipe for a data source, by the rules in docs/your-data.md.

The defaults were chosen on validation rows from a panel of public data sets
(docs/results/panel.md).
"""

import json
import math
import re
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from model_store.artifacts.manifest import NAME_PATTERN
from model_store.conformal.calibration import few_rows_warning
from model_store.errors import InvalidInput
from training.data.column_findings import tail_length
from training.data.findings import Findings
from training.data.rows import default_rows, default_test_fraction
from training.data.targets import is_count
from training.recipe import Recipe, load, validate
from training.sections import DataSection

MIN_CLASS_ROWS = 3  # at least one of them trains
MIN_ROWS = 20
STEP_S = 0.004  # overhead of a step on one core
CONVOLUTION_RATE = 3e9  # multiplications per second and core
MATRIX_RATE = 1e10  # multiplications per second and core
MAX_FIT_S = 60.0  # for all steps
MIN_STEPS, MAX_STEPS = 600, 20_000
MIN_EPOCHS, MAX_MIN_STEPS = 3, 4_000  # fewer epochs if these would take more steps, but at least 1
# Interquartile ranges from a target's median to its furthest value; 10,000 Gaussian targets have 3.
HEAVY_TARGET = 10.0
SPLITS = ("validation", "reference", "ranking")
RECIPE_WIDTH = 60  # characters before a reason
COUNTS = "counts: held-out rows select the unchanged target, its logarithm or its ranks"
UNITS, DROPOUT, BINS, MEMBERS = 128, 0.1, 16, 8  # for dense networks
MAX_BINS = 1024  # of all columns
MAX_COLUMNS, MAX_INPUTS = 128, 64  # of tables with more columns, networks read the most important
MAX_REFIT_ROWS = 10_000  # larger fits gain little from validation rows
MIN_CONVOLUTION_SIDE = 14  # pixels
CHECKSUM = "# `dubito fit --data` may replace this file while its checksum is "


@dataclass(frozen=True)
class Plan:
    recipe: Recipe
    reasons: dict[str, str]
    warnings: list[str]


class _Draft:
    """A recipe under construction, with the reasons for its settings."""

    def __init__(self) -> None:
        self.content: dict[str, Any] = {}
        self.reasons: dict[str, str] = {}

    def set(self, key: str, value: Any, reason: str | None = None) -> None:
        """Set a key, such as `data.validation`."""
        section, _, name = key.rpartition(".")
        content = self.content.setdefault(section, {}) if section else self.content
        content[name] = value
        if reason is not None:
            self.reasons[key] = reason


def make_plan(findings: Findings, section: DataSection, name: str | None, seed: int | None) -> Plan:
    if findings.target is not None and findings.task is None:
        field, expected = f"column {findings.target}", "numbers or classes as the target"
        raise InvalidInput(field, expected, findings.reason)
    if findings.task is None:
        raise InvalidInput("--target", "the name of a column", "none")
    if findings.rows < MIN_ROWS:
        raise InvalidInput("data.source", f"at least {MIN_ROWS} rows", f"{findings.rows}")
    draft = _Draft()
    draft.set("name", name or model_name_for(findings.source))
    draft.set("task", findings.task, findings.reason)
    draft.set("seed", seed or 0)
    fraction = section.test_fraction or default_test_fraction(findings.rows)
    test = 0 if findings.has_test else round(fraction * findings.rows)
    rare = _rare_classes(findings, section)
    left_out = [*section.leave_out, *rare]
    rows = findings.rows - test - sum(findings.classes.get(label, 0) for label in left_out)
    if rows <= 0:
        expected = f"classes with at least {MIN_CLASS_ROWS} rows each"
        received = f"{len(findings.classes)} classes in {findings.rows} rows"
        raise InvalidInput(f"column {findings.target}", expected, received)
    sizes = {split: default_rows(split, rows) for split in SPLITS}
    train = rows - sum(sizes.values())
    _plan_data(draft, findings, section)
    for split, size in sizes.items():
        draft.set(f"data.{split}", round_share(size, rows), f"{size} of {rows} rows")
    warnings = []
    if rare:
        reason = f"fewer than {MIN_CLASS_ROWS} rows"
        draft.set("data.leave_out", left_out, reason)
        class_list = ", ".join(f"{label!r} ({findings.classes[label]})" for label in rare[:10])
        rest = f" and {len(rare) - 10} more" if len(rare) > 10 else ""
        message = f"leaving out classes with {reason}"
        warnings.append(f"{message}: {class_list}{rest} (data.leave_out)")
    if findings.task == "regression":
        draft.set("likelihood.noise", "heteroscedastic", "the model learns the noise of each row")
        transform_reason = _transform_reason(findings.targets)
        if transform_reason is not None:
            draft.set("data.target_transform", "auto", transform_reason)
    is_image = findings.source.startswith("images:")
    if is_image and min(findings.shape[-2:]) >= MIN_CONVOLUTION_SIDE:
        row_s = _plan_convolutions(draft, findings) / CONVOLUTION_RATE
    else:
        row_s = _plan_layers(draft, findings, train) / MATRIX_RATE
    _plan_training(draft, train, row_s)
    too_few = few_rows_warning(sizes["ranking"])
    warnings += [] if too_few is None else [too_few]
    return Plan(validate(draft.content, "plan"), draft.reasons, warnings)


def _plan_data(draft: _Draft, findings: Findings, section: DataSection) -> None:
    for key, value in section.model_dump(exclude_defaults=True).items():
        draft.set(f"data.{key}", value)
    if not findings.has_test and section.test_fraction is None:
        fraction = default_test_fraction(findings.rows)
        draft.set("data.test_fraction", fraction, "a fifth of the rows, up to 10,000")
    ignored = {c.name: c.reason for c in findings.columns if c.kind == "ignored"}
    columns = section.columns | dict.fromkeys(ignored, "ignored")
    if columns:
        reason = "; ".join(f"{name}: {text}" for name, text in ignored.items())
        draft.set("data.columns", columns, reason)
    ids = [column.name for column in findings.columns if column.is_id]
    if ids and section.id is None:
        draft.set("data.id", ids[0], "names training rows in explanations")
    if findings.image_size is not None:
        reason = "images have several sizes, or are large"
        draft.set("data.image_size", list(findings.image_size), reason)


def _rare_classes(findings: Findings, section: DataSection) -> list[str]:
    sizes = {label: n for label, n in findings.classes.items() if label not in section.leave_out}
    rare = [label for label, n in sizes.items() if n < MIN_CLASS_ROWS]
    return rare if len(sizes) - len(rare) >= 2 else []


def _plan_convolutions(draft: _Draft, findings: Findings) -> float:
    """Plan a convolutional network, and return its number of multiplications per row."""
    draft.set("method", "dropout", "dropout, the cheapest posterior for convolutions")
    draft.set("network", {"kind": "gal-cnn"}, "convolutions for images")
    draft.set("posterior.prior_std", 1.0)
    draft.set("training.learning_rate", 1e-3)
    pixels, kernels = min(findings.shape[-2:]) ** 2, 17 if len(findings.shape) == 2 else 20
    return float(pixels * 16 * 32 * kernels + 32 * 128 * pixels / 4)


def _plan_layers(draft: _Draft, findings: Findings, train: int) -> float:
    """Plan a dense network, and return its number of multiplications per row."""
    reason = (
        "tested on a panel of public data sets (docs/results/panel.md); "
        "anchored-ensemble is more uncertain between clusters of rows"
    )
    draft.set("method", "batch-ensemble", reason)
    network = {"hidden": [UNITS, UNITS], "dropout": DROPOUT}
    draft.set("network", network, "two hidden layers")
    width, columns = math.prod(findings.shape), len(findings.used)
    if not findings.shape and columns:
        if columns > MAX_COLUMNS:
            reason = "the most important numbers of a row, unless all predict better"
            draft.set("network.max_inputs", MAX_INPUTS, reason)
            columns = MAX_INPUTS
        bins = min(BINS, MAX_BINS // columns)
        draft.set("network.bins", bins, "quantiles by which each number is encoded")
        width = (1 + bins) * columns
    draft.set("posterior", {"members": MEMBERS, "prior_std": 1.0})
    draft.set("training.learning_rate", 2e-3)
    draft.set("training.early_stopping", True)
    if train < MAX_REFIT_ROWS:
        reason = "a second fit also uses the validation rows"
        draft.set("training.early_stopping", "refit", reason)
    outputs = max(2, len(findings.classes))
    return float(MEMBERS * (width * UNITS + UNITS * UNITS + UNITS * outputs))


def _plan_training(draft: _Draft, train: int, row_s: float) -> None:
    batch = 32 if train < 2_000 else 128 if train < 50_000 else 256
    steps = max(1, train // min(batch, max(1, train)))
    step_s = STEP_S + 3 * row_s * batch
    max_steps = min(max(MIN_STEPS, round(MAX_FIT_S / step_s)), MAX_STEPS)
    epochs = max(1, max_steps // steps, min(MIN_EPOCHS, MAX_MIN_STEPS // steps))
    max_steps = epochs * steps
    draft.set("training.batch_rows", batch, f"of {train} training rows")
    seconds = f"about {max_steps * step_s:.0f} s on one core"
    reason = f"{max_steps} steps, {seconds}; fewer with early stopping"
    draft.set("training.max_epochs", epochs, reason)


def model_name_for(source: str) -> str:
    stem = re.split(r"[/\\]", source.partition(":")[2].rstrip("/\\"))[-1].split(".")[0]
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("-._")[:64]
    return name if re.match(NAME_PATTERN, name) else "model"


def round_share(size: int, rows: int) -> float:
    for digits in range(1, 9):
        share = round(size / rows, digits)
        if 0 < share < 0.5 and round(share * rows) == size:
            return share
    return size / rows


def _transform_reason(targets: np.ndarray | None) -> str | None:
    if targets is None or not len(targets):
        return None
    y = targets[np.isfinite(targets)].astype(np.float64)
    if is_count(y) and y.min() <= y.std():
        return COUNTS
    tail = tail_length(y)
    if tail <= HEAVY_TARGET:
        return None
    ranges = f"{np.round(tail):.6g} interquartile ranges"
    return f"a heavy tail ({ranges}): held-out rows select the target's scale"


def recipe_text(plan: Plan) -> str:
    content = plan.recipe.model_dump(exclude_defaults=True, exclude_none=True)
    content["posterior"] = plan.recipe.posterior.model_dump(exclude_none=True)
    content["training"] = plan.recipe.training.model_dump(exclude_none=True)
    content.setdefault("task", plan.recipe.task)
    content.setdefault("seed", plan.recipe.seed)
    tables = {key: value for key, value in content.items() if isinstance(value, dict)}
    reasons = plan.reasons
    lines = ["# Generated from the data by the rules of docs/your-data.md. Edit it as needed.", ""]
    values = {key: value for key, value in content.items() if key not in tables}
    lines += [_line(key, value, reasons.get(key)) for key, value in values.items()]
    for table, values in tables.items():
        reason = reasons.get(table)
        lines += ["", f"[{table}]" + (f"  # {reason}" if reason else "")]
        lines += [_line(key, value, reasons.get(f"{table}.{key}")) for key, value in values.items()]
    return "\n".join(lines) + "\n"


def write_recipe(plan: Plan, path: Path) -> Recipe:
    """Write and reload a recipe. It may replace a generated recipe that was not edited."""
    text = _add_checksum(recipe_text(plan))
    try:
        if path.exists() and not _is_generated(path.read_text(encoding="utf-8")):
            expected = "a path without a recipe that you wrote or edited (`fit RECIPE` fits it)"
            raise InvalidInput("--recipe-out", expected, str(path))
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        received = f"{path}: {error.strerror}"
        raise InvalidInput("--recipe-out", "a writable path", received) from None
    return load(path)


def _add_checksum(text: str) -> str:
    return f"{text}\n{CHECKSUM}{sha256(text.encode()).hexdigest()[:16]}\n"


def _is_generated(text: str) -> bool:
    return text == _add_checksum(text.rpartition(f"\n{CHECKSUM}")[0])


def _line(key: str, value: Any, reason: str | None) -> str:
    line = f"{_key(key)} = {_value(value)}"
    if not reason:
        return line
    reason_text = "".join(c if c.isprintable() else "?" for c in " ".join(reason.split()))
    return f"{line:<{RECIPE_WIDTH}}  # {reason_text}"


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _value(key)


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{_key(k)} = {_value(inner)}" for k, inner in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
