"""Fit a candidate on labels from the service, and compare it with `latest`.

A candidate starts from the weights of `latest`. Its training rows are those of `latest` and all
labelled rows except control rows. Validation, calibration and test rows stay the same.
`docs/labels.md` describes when it is promoted.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool

from model_store.artifacts.manifest import Manifest
from model_store.artifacts.store import LATEST, ModelStore
from model_store.inference.model import NEEDED, Model
from model_store.scores.transforms import Transform, to_fitted
from model_store.state.database import Database
from model_store.state.labels import (
    LabelledRows,
    candidates,
    labelled_rows,
    row_format,
    save_candidate,
)
from model_store.state.live import MIN_CONTROL_ROWS
from training import log
from training.data.rows import Dataset, Rows, Splits, split, split_sizes
from training.evaluation import evaluate
from training.evaluation.metrics import Figure
from training.evaluation.pairs import compare_figures, list_worse_metrics
from training.evaluation.quality import measure
from training.fit import fit, publish
from training.versions import AddedLabels, Parent, Provenance, fitted_data, manifests, open_parent

CANDIDATE = "candidate"
NO_WORSE = "no worse"
UNKNOWN_KEYS = "some labels were sent without a key"
APPROVE = "approve it on the page, or run `dubito store alias {name} latest {version}`"
# Metrics with their tolerated losses, for recipes without a gate.
TOLERANCES: dict[str, dict[str, float]] = {
    "classification": {"test_accuracy": 0.0, "test_log_likelihood": 0.01},
    "regression": {"test_rmse": 0.0, "test_log_likelihood": 0.01},
}


@dataclass(frozen=True, eq=False)
class CandidateData:
    parent: Parent
    data: Dataset
    splits: Splits  # without labelled rows
    labels: LabelledRows
    is_usable: Bool[np.ndarray, "N"]  # by labelled row
    provenance: AddedLabels

    @property
    def train(self) -> Rows:
        return self._rows(self.is_usable & ~self.labels.is_control)

    @property
    def control(self) -> Rows:
        return self._rows(self.is_usable & self.labels.is_control)

    def _rows(self, selection: Bool[np.ndarray, "N"]) -> Rows:
        index = np.flatnonzero(selection)
        values = [self.labels.values[i] for i in index]
        number = {name: c for c, name in enumerate(self.data.classes)}
        if self.data.classes:
            y = np.array([number[str(value)] for value in values], dtype=np.int64)
        else:
            y = np.array(values, dtype=np.float32)
        ids = np.array([self.labels.ids[i] for i in index], dtype=str)
        return Rows(self.labels.x[index], y, ids)


def gather_labels(
    store: ModelStore, database: Database, name: str, root: Path, source: str | None = None
) -> CandidateData:
    parent = open_parent(store, f"{name}:{LATEST}", "NAME")
    data = fitted_data(parent, root, source)
    splits = split(data, split_sizes(parent.recipe))
    labels = labelled_rows(database, name, row_format(parent.manifest), splits.train.x.shape[1])
    parts = (splits.validation, splits.reference, splits.ranking, splits.test)
    held_out = {row.tobytes() for rows in parts for row in rows.x.astype(np.float32)}
    is_held_out = np.array([row.tobytes() in held_out for row in labels.x], dtype=bool)
    is_known = _have_known_values(labels, data, parent.manifest.transform)
    left_out = {
        "rows with other inputs than the version has": labels.left_out,
        "classes or targets unknown to the version": int((~is_known).sum()),
        "copies of held-out rows": int((is_known & is_held_out).sum()),
    }
    is_usable = is_known & ~is_held_out
    facts = AddedLabels(
        rows=int((is_usable & ~labels.is_control).sum()),
        digest=labels.digest(),
        left_out={reason: count for reason, count in left_out.items() if count},
    )
    return CandidateData(parent, data, splits, labels, is_usable, facts)


def _have_known_values(
    labels: LabelledRows, data: Dataset, transform: Transform | None
) -> Bool[np.ndarray, "N"]:
    if data.classes:
        return np.array([value in data.classes for value in labels.values], dtype=bool)
    targets = np.array([value if isinstance(value, float) else np.nan for value in labels.values])
    return np.isfinite(targets if transform is None else to_fitted(transform, targets))


def fit_candidate(store: ModelStore, sources: CandidateData, device: torch.device) -> Manifest:
    name, origin = sources.parent.manifest.name, sources.parent.provenance
    for manifest in manifests(store, name):
        facts = Provenance.of(manifest)
        is_same = facts.labels is not None and facts.labels.digest == sources.provenance.digest
        if is_same and facts.warm_start == origin:
            log.info("%s was already fitted on these labels", manifest.label)
            store.set_alias(name, CANDIDATE, manifest.version)
            return manifest
    old, new = len(sources.splits.train), len(sources.train)
    message = "fitting %d training rows and %d labelled rows from %s"
    log.info(message, old, new, sources.parent.label)
    result = fit(
        sources.parent.recipe,
        sources.data,
        start=sources.parent,
        extra=sources.train,
        device=device,
    )
    provenance = result.provenance.model_copy(update={"labels": sources.provenance})
    manifest = publish(replace(result, provenance=provenance), store, name=name, alias=CANDIDATE)
    log.info("published %s version %s as %s", name, manifest.version, CANDIDATE)
    evaluate.write_report(store, manifest, sources.data)
    return manifest


def count_tried_labels(
    store: ModelStore, database: Database, name: str, promote: bool = False
) -> int:
    """Return the larger of the label counts used by `latest` and the last candidate.

    A candidate counts once it has been compared with `latest`. If `promote`, it must also have been
    rejected or promoted.
    """
    judged = {
        row["version"]
        for row in candidates(database, name)
        if row["promoted"] or row["reason"] != NO_WORSE or not promote
    }
    aliases = store.aliases(name)
    versions = {aliases.get(LATEST)} | ({aliases.get(CANDIDATE)} & judged)
    return max((count_labels(store, name, v) for v in versions if v is not None), default=0)


def count_labels(store: ModelStore, name: str, version: str) -> int:
    labels = Provenance.of(store.manifest(name, version)).labels
    return 0 if labels is None else labels.rows


def judge(
    store: ModelStore, sources: CandidateData, manifest: Manifest, promote: bool = False
) -> dict[str, Any]:
    """Compare a candidate with `latest` on the test rows and on labelled control rows.

    Returns the reason why it is not promoted, and both comparisons.
    """
    name, recipe = manifest.name, sources.parent.recipe
    tolerances = TOLERANCES[recipe.task] if recipe.gate is None else recipe.gate.metrics
    label = f"{LATEST} (version {sources.parent.manifest.version})"
    versions = manifest.version, sources.parent.manifest.version
    candidate, latest = (Model.load(store.open(name, version, NEEDED)) for version in versions)

    def compare(rows: Rows, kind: str) -> tuple[dict[str, Any], list[str]]:
        before, after = (
            measure(model, rows, sources.data, recipe.seed).figures for model in (latest, candidate)
        )
        worse = list_worse_metrics(tolerances, after, before, label, recipe.seed, kind)
        compared = compare_figures(_test_figures(before), _test_figures(after), recipe.seed)
        return {"rows": len(rows), "figures": compared}, worse

    test, worse = compare(sources.data.test, "test rows")
    reasons = [f"{name} is worse than {label} in", *worse] if worse else []
    control = None
    if len(sources.control) < MIN_CONTROL_ROWS:
        message = "%d labelled control rows are too few for a comparison (it needs %d)"
        log.info(message, len(sources.control), MIN_CONTROL_ROWS)
    else:
        control, worse = compare(sources.control, "control rows")
        if worse:
            reasons += ["on control rows it is worse in", *worse]
    if promote and not reasons and not sources.labels.have_keys:
        reasons.append(UNKNOWN_KEYS)
    return {"reason": "\n".join(reasons) or NO_WORSE, "test": test, "control": control}


def _test_figures(figures: dict[str, Figure]) -> dict[str, Figure]:
    names = [name for name in sorted(figures) if name.startswith("test_")]
    return {name.removeprefix("test_"): figures[name] for name in names}


def make_candidate(
    store: ModelStore,
    database: Database,
    sources: CandidateData,
    device: torch.device,
    promote: bool = False,
) -> None:
    """Fit, publish and assess a candidate.

    If `promote`, a candidate that is no worse than `latest` replaces it. A candidate that was
    promoted and rolled back before is not promoted again.
    """
    name, parent = sources.parent.manifest.name, sources.parent.manifest
    manifest = fit_candidate(store, sources, device)
    promoted = {row["version"] for row in candidates(database, name) if row["promoted"]}
    if manifest.version in promoted:
        log.info("%s version %s was promoted and rolled back before", name, manifest.version)
        return
    verdict = judge(store, sources, manifest, promote)
    counts = sources.provenance.rows, len(sources.control)
    save_candidate(database, name, manifest.version, parent.version, *counts, False, verdict)
    if promote and verdict["reason"] == NO_WORSE:
        store.set_alias(name, LATEST, manifest.version)
        save_candidate(database, name, manifest.version, parent.version, *counts, True, verdict)
        log.info("%s: promoted", manifest.label)
    else:
        log.info("%s: %s", manifest.label, verdict["reason"])
        log.info("to serve it, " + APPROVE.format(name=name, version=manifest.version))
