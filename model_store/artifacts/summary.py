"""What a version is, in lines to read: `python -m model_store show`."""

from typing import Any

from model_store.artifacts.limits import too_few_rows
from model_store.artifacts.manifest import AnyColumn, CategoricalColumn, InputSpec, Manifest
from model_store.artifacts.report import evaluation_report
from model_store.artifacts.signature import SIGNATURE
from model_store.artifacts.store import ModelStore

SHOWN = 12  # of categories and classes
LEFT_OUT = (
    "recipe",
    "convergence",
)  # of the facts of training: records of their own, whose words are shown


def summary(store: ModelStore, name: str, version: str) -> list[str]:
    """Return what the manifest of a version (a number) says, and what lies beside it; files are not
    verified.

    Raises:
        StoreError: as `ModelStore.manifest` does.
    """
    manifest = store.manifest(name, version)
    aliases = sorted(alias for alias, of in store.aliases(name).items() if of == version)
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
        "size": f"{sum(file.size for file in manifest.files.values()):,} bytes in {len(manifest.files)} files",
        "digest": manifest.digest,
        "signature": _signature(store, name, version),
        "evidence": _evidence(store, name, version),
    }
    width = max(map(len, parts))
    title = f"{name} version {version}" + (f" ({', '.join(aliases)})" if aliases else "")
    return [title, *(f"  {key:{width}}  {text}" for key, text in parts.items())]


def _rows(spec: InputSpec) -> str:
    shape = " x ".join(map(str, spec.shape))
    if spec.text is not None:
        return f"text of column {spec.text.column}, {shape} tokens of a vocabulary of {spec.maximum + 1:.0f}"
    if spec.takes_ids:
        return f"{shape} ids from {spec.minimum:.0f} to {spec.maximum:.0f}"
    kind = (
        ""
        if spec.image is None
        else "images, grey, "
        if spec.image.mode == "L"
        else "images, colour, "
    )
    return f"{kind}{shape} numbers from {spec.minimum:g} to {spec.maximum:g}"


def _column(column: AnyColumn) -> str:
    if isinstance(column, CategoricalColumn):
        return f"categorical: {_few(column.categories)}"
    return f"{column.kind}{', may be missing' if column.indicator else ''}"


def _output(manifest: Manifest) -> dict[str, str]:
    if manifest.classes is None:
        return {"target": str(manifest.target)}
    return {"classes": f"{len(manifest.classes)}: {_few(manifest.classes)}"}


def _few(names: tuple[str, ...]) -> str:
    return ", ".join(names[:SHOWN]) + (f", ... ({len(names)} in all)" if len(names) > SHOWN else "")


def _calibration(manifest: Manifest) -> str:
    detectors = manifest.detectors
    rows = f"{detectors.reference_rows} reference rows, {detectors.ranking_rows} ranking rows"
    too_few = too_few_rows(detectors, manifest.categories)
    if manifest.categories is not None:
        rows += f", by {manifest.categories.kind}"
    return f"{rows}, smallest fpr {detectors.smallest_fpr:.4g}{'' if too_few is None else f'; {too_few}'}"


def _training(facts: dict[str, Any]) -> dict[str, str]:
    """Return the facts of a fit that are a word, a number, or a record of such."""
    found = {key: _short(value) for key, value in facts.items() if key not in LEFT_OUT}
    for record, key in (("recipe", "data"), ("convergence", "says")):
        part = facts.get(record)
        said = part.get(key) if isinstance(part, dict) else None
        if isinstance(said, dict) and "source" in said:
            found["data"] = _short(said["source"])
        elif isinstance(said, str):
            found["convergence"] = said
    return {key: text for key, text in found.items() if text}


def _short(value: Any) -> str:
    """Return a value in one line; empty where there is none, or where it would be long."""
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
    if store.trusted is not None:  # else the manifest would have been refused
        return "by the trusted key"
    return (
        "there is one; --key checks it"
        if store.storage.has(f"{name}/{version}/{SIGNATURE}")
        else "none"
    )


def _evidence(store: ModelStore, name: str, version: str) -> str:
    found = evaluation_report(store, name, version)
    how = f"none; `python -m training evaluate {name}:{version}` makes it"
    return how if found is None else f"report of {found.report.get('created', 'a day unknown')}"
