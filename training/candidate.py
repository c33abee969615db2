"""Fit a candidate on labels from the service, and compare it with `latest`.

A candidate starts from the weights of `latest`. Its training rows are those of `latest` and all
labelled rows except control rows. Validation, calibration and test rows stay the same. The
candidate is published under the alias `candidate`.

With `--promote`, `latest` moves to the candidate under these conditions:

* The candidate is not significantly worse than `latest` on test rows.
* It is not significantly worse on labelled control rows, if there are enough of them.
* It is not significantly worse than the best version of its lineage, so small losses do not add up.
* All labels were sent with a key.
"""

from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool

from model_store.artifacts.manifest import TOKENIZER, Manifest
from model_store.artifacts.store import LATEST, ModelStore
from model_store.errors import StoreError
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
from training.data import Dataset, Rows, Splits, split, split_sizes
from training.evaluation import evaluate
from training.evaluation.figures import Figure, Resamples
from training.evaluation.pairs import difference, worse_by
from training.fit import fit, publish
from training.provenance import AddedLabels, Provenance
from training.publishing.draft import Draft
from training.publishing.gate import (
    GateError,
    check_gate,
    check_no_worse,
    describe_loss,
    list_worse_metrics,
)
from training.publishing.publish import quality_rows
from training.publishing.quality import MeasuredRows, measure
from training.recipe import GateSection
from training.versions import Parent, fitted_data, manifests, open_parent

CANDIDATE = "candidate"
NO_WORSE = "no worse"
UNKNOWN_KEYS = "some labels were sent without a key"
APPROVE = "approve it on the page, or run `dubito store alias {name} latest {version}`"
# The metrics of recipes without a gate, and the tolerated loss in each metric.
GATES: dict[str, dict[str, float]] = {
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
    """Load the training data of `latest` and the new labels."""
    parent = open_parent(store, f"{name}:{LATEST}", "NAME")
    data = fitted_data(parent, root, source)
    splits = split(data, split_sizes(parent.recipe))
    labels = labelled_rows(database, name, row_format(parent.manifest), splits.train.x.shape[1])
    held_out = {
        row.tobytes()
        for rows in (splits.validation, splits.reference, splits.ranking, splits.test)
        for row in rows.x.astype(np.float32)
    }
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


def fit_candidate(
    store: ModelStore, sources: CandidateData, runs: Path, root: Path, device: torch.device
) -> Manifest:
    name, origin = sources.parent.manifest.name, sources.parent.provenance
    for manifest in manifests(store, name):
        facts = Provenance.of(manifest)
        is_same = facts.labels is not None and facts.labels.digest == sources.provenance.digest
        if is_same and facts.warm_start == origin:
            log.info("%s was already fitted on these labels", manifest.label)
            store.set_alias(name, CANDIDATE, manifest.version)
            return manifest
    old, new = len(sources.splits.train), len(sources.train)
    log.info(
        "fitting %d training rows and %d labelled rows from %s", old, new, sources.parent.label
    )
    result = fit(
        sources.parent.recipe,
        sources.data,
        start=sources.parent,
        extra=sources.train,
        device=device,
        runs=runs,
    )
    provenance = result.provenance.model_copy(update={"labels": sources.provenance})
    manifest = publish(replace(result, provenance=provenance), store, name=name, alias=CANDIDATE)
    log.info("published %s version %s as %s", name, manifest.version, CANDIDATE)
    evaluate.write_report(store, manifest, sources.data, root)
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


@dataclass(frozen=True)
class Verdict:
    reason: str
    test: dict[str, Any]  # comparison with `latest` on test rows
    control: dict[str, Any] | None  # and on labelled control rows
    losses: dict[str, Any]  # by metric, relative to the best version of the lineage

    def content(self) -> dict[str, Any]:
        comparisons = {"test": self.test, "control": self.control, "lost": self.losses}
        return {"reason": self.reason, **comparisons}


def lineage(store: ModelStore, manifest: Manifest) -> list[Manifest]:
    """Return a version and its ancestors, newest first.

    A version's parent is the version to which it added labels. The lineage ends before the first
    version with other data or without an entry in the store.
    """
    line = [manifest]
    with suppress(StoreError):
        while (
            facts := Provenance.of(line[-1])
        ).labels is not None and facts.warm_start is not None:
            parent = store.manifest(manifest.name, facts.warm_start.version)
            if int(parent.version) >= int(line[-1].version):  # an imported version
                break
            if Provenance.of(parent).data_digest != facts.data_digest:  # different test rows
                break
            line.append(parent)
    return line


def best_at(line: list[Manifest], metric: str) -> Manifest | None:
    """Return the version with the best value of a metric, or None if none has it."""
    measured = [version for version in line if metric in version.quality]

    def distance(version: Manifest) -> float:
        return worse_by(metric, version.quality[metric], measured[0].quality[metric])

    return min(measured, key=distance, default=None)


def measure_loss(best: Manifest, manifest: Manifest, metric: str) -> dict[str, Any]:
    """Measure and log how much worse a candidate is than its lineage's best version."""
    before, after = best.quality[metric], manifest.quality[metric]
    loss = worse_by(metric, after, before)
    message = "%s: %.6g against %.6g of version %s, the best of its lineage: %s"
    log.info(message, metric, after, before, best.version, describe_loss(loss))
    return {"version": best.version, "best": before, "candidate": after, "worse_by": loss}


def judge(
    store: ModelStore, sources: CandidateData, manifest: Manifest, root: Path, promote: bool = False
) -> Verdict:
    name, recipe = manifest.name, sources.parent.recipe
    gate = GateSection(against=LATEST, metrics=GATES[recipe.task])
    if recipe.gate is not None:
        gate = recipe.gate.model_copy(update={"against": LATEST})
    gated = recipe.model_copy(update={"gate": gate})
    artifact = store.open(name, manifest.version, (*NEEDED, TOKENIZER))
    candidate = Model.load(artifact)
    latest = Model.load(store.open(name, sources.parent.manifest.version, NEEDED))
    rows = quality_rows(recipe, sources.data, sources.splits)
    draft = Draft(artifact.manifest, dict(artifact.files), measure(candidate, rows).figures)
    reasons, losses = [], {}
    try:
        check_gate(gated, store, name, draft, rows, root)
    except GateError as error:
        reasons.append(str(error))
    line = lineage(store, sources.parent.manifest)
    for metric, allowed in gate.metrics.items():
        best = best_at(line, metric)
        if best is None or metric not in manifest.quality:
            continue
        losses[metric] = measure_loss(best, manifest, metric)
        if best.version != sources.parent.manifest.version:
            one_metric = gate.model_copy(update={"metrics": {metric: allowed}})
            label = "the best of its lineage"
            try:
                check_no_worse(recipe, one_metric, best, label, store, draft, rows, root)
            except GateError as error:
                reasons.append(str(error))
    test = compare_figures(measure(latest, rows).figures, draft.figures, recipe.seed)
    control = None
    if len(sources.control) < MIN_CONTROL_ROWS:
        message = "%d labelled control rows are too few for a comparison (it needs %d)"
        log.info(message, len(sources.control), MIN_CONTROL_ROWS)
    else:
        control, worse = _compare_on_control(sources, latest, candidate, gate, rows)
        if worse:
            reasons += ["on control rows it is worse in", *worse]
    if promote and not reasons and not sources.labels.have_keys:
        reasons.append(UNKNOWN_KEYS)
    return Verdict("\n".join(reasons) or NO_WORSE, test, control, losses)


def _compare_on_control(
    sources: CandidateData,
    latest: Model,
    candidate: Model,
    gate: GateSection,
    rows: MeasuredRows,
) -> tuple[dict[str, Any], list[str]]:
    manifest, seed = sources.parent.manifest, sources.parent.recipe.seed
    control_rows = replace(rows, test=sources.control)
    figures, latest_figures = (
        measure(model, control_rows).figures for model in (candidate, latest)
    )
    label = f"{LATEST} (version {manifest.version})"
    worse = list_worse_metrics(gate, figures, latest_figures, label, seed, "control rows")
    return compare_figures(latest_figures, figures, seed), worse


def compare_figures(
    first: dict[str, Figure], second: dict[str, Figure], seed: int
) -> dict[str, Any]:
    """Compare two versions' test metrics, with confidence intervals.

    Metrics that do not cover the same number of rows are left out.
    """
    content, rows = {}, first["test_log_likelihood"].rows
    resamples = Resamples.draw(rows, seed)
    for metric in first.keys() & second.keys():
        if metric.startswith("test_") and first[metric].rows == second[metric].rows == rows:
            change = difference(first[metric], second[metric], resamples)
            content[metric.removeprefix("test_")] = {
                "against": change.first,
                "candidate": change.second,
                "difference": change.value,
                "interval": list(change.interval),
                "p_value": change.p_value,
            }
    return {"rows": rows, "figures": dict(sorted(content.items()))}


def make_candidate(
    store: ModelStore,
    database: Database,
    sources: CandidateData,
    runs: Path,
    root: Path,
    device: torch.device,
    promote: bool = False,
) -> None:
    """Fit, publish and assess a candidate.

    If `promote`, a candidate that is no worse than `latest` replaces it. A candidate that was
    promoted and rolled back before is not promoted again.
    """
    name, parent = sources.parent.manifest.name, sources.parent.manifest
    manifest = fit_candidate(store, sources, runs, root, device)
    promoted = {row["version"] for row in candidates(database, name) if row["promoted"]}
    if manifest.version in promoted:
        log.info("%s version %s was promoted and rolled back before", name, manifest.version)
        return
    verdict = judge(store, sources, manifest, root, promote)
    content = verdict.content()
    counts = sources.provenance.rows, len(sources.control)
    save_candidate(database, name, manifest.version, parent.version, *counts, False, content)
    if promote and verdict.reason == NO_WORSE:
        store.set_alias(name, LATEST, manifest.version)
        save_candidate(database, name, manifest.version, parent.version, *counts, True, content)
        log.info("%s: promoted", manifest.label)
    else:
        log.info("%s: %s", manifest.label, verdict.reason)
        log.info("to serve it, " + APPROVE.format(name=name, version=manifest.version))
