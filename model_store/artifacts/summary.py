"""The text summary of a version, as printed by `dubito store show`."""

from contextlib import suppress
from typing import Any

from model_store.artifacts.manifest import (
    AnyColumn,
    CategoricalColumn,
    CategorySpec,
    DetectorSpec,
    InputSpec,
    Manifest,
)
from model_store.artifacts.report import evaluation_report
from model_store.artifacts.signature import MAX_SIGNATURES_BYTES, SIGNATURE
from model_store.artifacts.store import ModelStore
from model_store.conformal.calibration import DEFAULT_COVERAGE, DEFAULT_FPR, few_rows_warning
from model_store.conformal.mondrian import MIN_CAUTIOUS_ROWS

MAX_SHOWN = 12  # names of categories and classes
MAX_SHOWN_FEW = 10  # names of categories with too few rows
SUMMARISED = ("recipe", "convergence")  # shown in part


def summary(store: ModelStore, name: str, version: str) -> list[str]:
    """Summarize a version's manifest, signature and report, without verifying its files."""
    manifest = store.manifest(name, version)
    sizes = [file.size for file in manifest.files.values()]
    aliases = sorted(alias for alias, number in store.aliases(name).items() if number == version)
    parts = {
        "published": f"{manifest.created:%Y-%m-%d %H:%M %Z}",
        "method": manifest.method,
        "task": manifest.task,
        "input": _rows(manifest.input),
        **{f"column {column.name}": _column(column) for column in manifest.input.columns},
        **_output(manifest),
        "draws": f"{manifest.noise.default_draws} unless a request says otherwise",
        "calibration": _calibration(manifest),
        **{f"quality {key}": f"{value:.6g}" for key, value in manifest.quality.items()},
        **{f"training {key}": value for key, value in _training(manifest.training).items()},
        "size": f"{sum(sizes):,} bytes in {len(sizes)} files",
        "digest": manifest.digest,
        "signature": _signature(store, name, version),
        "report": _report(store, name, version),
    }
    width = max(map(len, parts))
    title = f"{name} version {version}" + (f" ({', '.join(aliases)})" if aliases else "")
    return [title, *(f"  {key:{width}}  {text}" for key, text in parts.items())]


def _rows(spec: InputSpec) -> str:
    shape = " x ".join(map(str, spec.shape))
    if spec.text is not None:
        vocabulary = f"{spec.maximum + 1:.0f}"
        return f"text of column {spec.text.column}, {shape} tokens of a vocabulary of {vocabulary}"
    if spec.takes_ids:
        return f"{shape} ids from {spec.minimum:.0f} to {spec.maximum:.0f}"
    kind = ""
    if spec.image is not None:
        kind = "images, grey, " if spec.image.mode == "L" else "images, colour, "
    return f"{kind}{shape} numbers from {spec.minimum:g} to {spec.maximum:g}"


def _column(column: AnyColumn) -> str:
    if isinstance(column, CategoricalColumn):
        return f"categorical: {_shorten(column.categories)}"
    return f"{column.kind}{', may be missing' if column.indicator else ''}"


def _output(manifest: Manifest) -> dict[str, str]:
    if manifest.classes is None:
        return {"target": str(manifest.target)}
    return {"classes": f"{len(manifest.classes)}: {_shorten(manifest.classes)}"}


def _shorten(names: tuple[str, ...]) -> str:
    rest = f", ... ({len(names)} in all)" if len(names) > MAX_SHOWN else ""
    return ", ".join(names[:MAX_SHOWN]) + rest


def _calibration(manifest: Manifest) -> str:
    detectors = manifest.detectors
    rows = f"{detectors.reference_rows} reference rows, {detectors.ranking_rows} ranking rows"
    too_few = too_few_rows(detectors, manifest.categories)
    if manifest.categories is not None:
        rows += f", by {manifest.categories.kind}"
    warning = "" if too_few is None else f"; {too_few}"
    return f"{rows}, smallest fpr {detectors.smallest_fpr:.4g}{warning}"


def _training(facts: dict[str, Any]) -> dict[str, str]:
    lines = {key: _short(value) for key, value in facts.items() if key not in SUMMARISED}
    with suppress(KeyError, TypeError):
        lines["data"] = _short(facts["recipe"]["data"]["source"])
    with suppress(KeyError, TypeError):
        lines["convergence"] = _short(facts["convergence"]["summary"])
    return {key: text for key, text in lines.items() if text}


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(
            f"{key} {_short(part)}"
            for key, part in value.items()
            if not isinstance(part, dict | list)
        )
    if isinstance(value, list) or value is None:
        return ""
    return " ".join((f"{value:.6g}" if isinstance(value, float) else str(value)).split())


def _signature(store: ModelStore, name: str, version: str) -> str:
    if store.trusted is not None:  # otherwise the manifest is rejected
        return "by a trusted key"
    try:
        store.storage.read(f"{name}/{version}/{SIGNATURE}", MAX_SIGNATURES_BYTES)
    except OSError:
        return "none"
    return "there is one; --key checks it"


def _report(store: ModelStore, name: str, version: str) -> str:
    latest = evaluation_report(store, name, version)
    if latest is None:
        return f"none; create it by `dubito evaluate {name}:{version}`"
    return f"created {latest.report.get('created', 'on an unknown day')}"


def too_few_rows(detectors: DetectorSpec, categories: CategorySpec | None) -> str | None:
    """Return a warning if there are too few ranking rows for the categories or default rates."""
    if categories is None:
        return few_rows_warning(detectors.ranking_rows)
    small_categories = [
        (name, min(rows))
        for name, *rows in zip(
            categories.names, categories.judged_rows, categories.true_rows, strict=True
        )
        if min(rows) < MIN_CAUTIOUS_ROWS
    ]
    if not small_categories:
        return None
    names = ", ".join(f"{name[:40]} {rows}" for name, rows in small_categories[:MAX_SHOWN_FEW])
    more = len(small_categories) - MAX_SHOWN_FEW
    suffix = f" and {more} more" if more > 0 else ""
    effect = (
        "is in every set"
        if categories.kind == "class"
        else "has sets and intervals that hold everything"
    )
    return (
        f"calibrated by {categories.kind}, and of {names}{suffix} there are fewer than "
        f"{MIN_CAUTIOUS_ROWS} ranking rows: "
        f"at fpr {DEFAULT_FPR:g} such a {categories.kind} is not flagged, at coverage "
        f"{DEFAULT_COVERAGE:g} it {effect}"
    )
