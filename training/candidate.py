"""From labels that came to the service to a candidate: fitted on old and new rows, compared,
promoted.

A candidate begins at the weights of what `latest` names, and is fitted on that version's training
rows and on all labelled rows that were not set aside; each counts as one row. Validation,
calibration and test rows stay what they were. It is always published under the alias `candidate`.

`latest` moves to it if it is no worse than what that named, beyond chance, on the test rows and,
where there are enough, on labelled control rows, which no fit sees; nor than the best version that
it comes of by labels, so that small losses do not add up; and if every label came with a key.
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
    keep_candidate,
    labelled_rows,
    row_format,
)
from model_store.state.live import FEWEST
from training import log
from training.data import Dataset, Rows, Splits, split, split_sizes
from training.evaluation.figures import Figure, Resamples
from training.evaluation.pairs import difference, worse_by
from training.fit import fit, publish
from training.provenance import AddedLabels, Provenance
from training.publishing.draft import Draft
from training.publishing.gate import (
    GateError,
    check_gate,
    check_no_worse,
    worse_beyond_chance,
)
from training.publishing.publish import quality_rows
from training.publishing.quality import Measurable
from training.recipe import GateSection
from training.versions import Parent, fitted_data, manifests, open_parent

CANDIDATE = "candidate"
NO_WORSE = "no worse"
UNKNOWN_KEYS = (
    "some labels came without a key, so a person has to promote it: "
    "`dubito store alias {name} latest {version}`"
)
# What a candidate must be no worse in, and by how much it may be, where its recipe has no gate.
GATES: dict[str, dict[str, float]] = {
    "classification": {"test_accuracy": 0.0, "test_log_likelihood": 0.01},
    "regression": {"test_rmse": 0.0, "test_log_likelihood": 0.01},
}


@dataclass(frozen=True, eq=False)
class Known:
    parent: Parent
    data: Dataset
    splits: Splits  # of the data alone
    labels: LabelledRows
    usable: Bool[np.ndarray, "N"]  # which labelled rows can be fitted or measured on
    provenance: AddedLabels

    @property
    def train(self) -> Rows:
        return self._rows(self.usable & ~self.labels.is_control)

    @property
    def chosen(self) -> Rows:
        return self._rows(self.usable & self.labels.is_chosen)

    @property
    def control(self) -> Rows:
        return self._rows(self.usable & self.labels.is_control)

    def _rows(self, chosen: Bool[np.ndarray, "N"]) -> Rows:
        index = np.flatnonzero(chosen)
        values = [self.labels.values[i] for i in index]
        number = {name: c for c, name in enumerate(self.data.classes)}
        if self.data.classes:
            y = np.array([number[str(value)] for value in values], dtype=np.int64)
        else:
            y = np.array(values, dtype=np.float32)
        ids = np.array([self.labels.ids[i] for i in index], dtype=str)
        return Rows(self.labels.x[index], y, ids)


def find_labels(
    store: ModelStore, database: Database, name: str, root: Path, source: str | None = None
) -> Known:
    """Return what there is to make a candidate of; `source` is where the data are, if not where
    they were."""
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
    is_known = _are_known(labels, data, parent.manifest.transform)
    left_out = {
        "of other inputs than the version takes": labels.left_out,
        "of no class or target that the version knows": int((~is_known).sum()),
        "the same as held-out rows": int((is_known & is_held_out).sum()),
    }
    usable = is_known & ~is_held_out
    facts = AddedLabels(
        rows=int((usable & ~labels.is_control).sum()),
        digest=labels.digest(),
        left_out={reason: count for reason, count in left_out.items() if count},
    )
    return Known(parent, data, splits, labels, usable, facts)


def _are_known(
    labels: LabelledRows, data: Dataset, transform: Transform | None
) -> Bool[np.ndarray, "N"]:
    if data.classes:
        return np.array([value in data.classes for value in labels.values], dtype=bool)
    targets = np.array([value if isinstance(value, float) else np.nan for value in labels.values])
    return np.isfinite(targets if transform is None else to_fitted(transform, targets))


def fit_candidate(store: ModelStore, known: Known, runs: Path, device: torch.device) -> Manifest:
    name, origin = known.parent.manifest.name, known.parent.provenance
    for manifest in manifests(store, name):
        made = Provenance.of(manifest)
        is_same = made.labels is not None and made.labels.digest == known.provenance.digest
        if is_same and made.warm_start == origin:
            log.info("%s was fitted on these labels", manifest.label)
            store.set_alias(name, CANDIDATE, manifest.version)
            return manifest
    old, new = len(known.splits.train), len(known.train)
    log.info("fitting %d + %d rows from %s", old, new, known.parent.label)
    begin: dict[str, Any] = {"start": known.parent, "extra": known.train}
    recipe = known.parent.recipe
    fitted = fit(recipe, known.data, **begin, device=device, runs=runs)
    provenance = fitted.provenance.model_copy(update={"labels": known.provenance})
    manifest = publish(replace(fitted, provenance=provenance), store, name=name, alias=CANDIDATE)
    log.info("published %s version %s as %s", name, manifest.version, CANDIDATE)
    return manifest


def labels_tried(store: ModelStore, database: Database, name: str) -> int:
    rows = candidates(database, name)
    judged = {row["version"] for row in rows if row["promoted"] or row["why"] != NO_WORSE}
    aliases = store.aliases(name)
    versions = {aliases.get(LATEST)} | ({aliases.get(CANDIDATE)} & judged)
    return max((labels_of(store, name, of) for of in versions if of is not None), default=0)


def labels_of(store: ModelStore, name: str, version: str) -> int:
    labels = Provenance.of(store.manifest(name, version)).labels
    return 0 if labels is None else labels.rows


@dataclass(frozen=True)
class Verdict:
    is_promoted: bool
    why: str
    control: dict[str, Any] | None
    lost: dict[str, Any]  # by metric, since the best version of its line


def line_of(store: ModelStore, manifest: Manifest) -> list[Manifest]:
    """Return a version and those that it comes of by labels on the same data, as far as they are
    there, the newest first."""
    line = [manifest]
    with suppress(StoreError):
        while (made := Provenance.of(line[-1])).labels is not None and made.warm_start is not None:
            before = store.manifest(manifest.name, made.warm_start.version)
            if int(before.version) >= int(line[-1].version):  # of no version that we published
                break
            if Provenance.of(before).data_digest != made.data_digest:  # other test rows
                break
            line.append(before)
    return line


def best_at(line: list[Manifest], metric: str) -> Manifest | None:
    """Return the version that was best at a metric; None where none has it."""
    known = [version for version in line if metric in version.quality]

    def distance(version: Manifest) -> float:
        return worse_by(metric, version.quality[metric], known[0].quality[metric])

    return min(known, key=distance, default=None)


def lost_since(best: Manifest, manifest: Manifest, metric: str) -> dict[str, Any]:
    """Return, and log, what a candidate and all promoted before it lost together."""
    before, now = best.quality[metric], manifest.quality[metric]
    lost = worse_by(metric, now, before)
    said = "%s: %.6g against %.6g of version %s, the best of its line: worse by %.6g in all"
    log.info(said, metric, now, before, best.version, lost)
    return {"version": best.version, "best": before, "candidate": now, "worse_by": lost}


def judge(store: ModelStore, known: Known, manifest: Manifest, root: Path) -> Verdict:
    name, recipe = manifest.name, known.parent.recipe
    gate = GateSection(against=LATEST, metrics=GATES[recipe.task])
    if recipe.gate is not None:
        gate = recipe.gate.model_copy(update={"against": LATEST})
    gated = recipe.model_copy(update={"gate": gate})
    artifact = store.open(name, manifest.version, (*NEEDED, TOKENIZER))
    mine = Measurable.of(Model.load(artifact))
    rows = quality_rows(recipe, known.data, known.splits)
    draft = Draft(artifact.manifest, dict(artifact.files), mine.figures(rows))
    reasons, lost = [], {}
    try:
        check_gate(gated, store, name, draft, rows, root)
    except GateError as error:
        reasons.append(str(error))
    line = line_of(store, known.parent.manifest)
    for metric, allowed in gate.metrics.items():
        best = best_at(line, metric)
        if best is None or metric not in manifest.quality:
            continue
        lost[metric] = lost_since(best, manifest, metric)
        if best.version != known.parent.manifest.version:
            of_it = gate.model_copy(update={"metrics": {metric: allowed}})
            called = "the best of its line"
            try:
                check_no_worse(recipe, of_it, best, called, store, draft, rows, root)
            except GateError as error:
                reasons.append(str(error))
    control = None
    if len(known.control) < FEWEST:
        said = "%d labelled control rows are too few to compare on (%d)"
        log.info(said, len(known.control), FEWEST)
    else:
        its = Measurable.of(Model.load(store.open(name, known.parent.manifest.version, NEEDED)))
        on_control = replace(rows, test=known.control)
        figures, others = mine.figures(on_control), its.figures(on_control)
        compared = compare_figures(others, figures, recipe.seed)
        control = {"rows": len(known.control), "figures": compared}
        label = f"{LATEST} (version {known.parent.manifest.version})"
        worse = worse_beyond_chance(gate, figures, others, label, recipe.seed, "control rows")
        if worse:
            reasons += ["on control rows it is worse in", *worse]
    if not reasons and not known.labels.are_known:
        reasons.append(UNKNOWN_KEYS.format(name=name, version=manifest.version))
    return Verdict(not reasons, "\n".join(reasons) or NO_WORSE, control, lost)


def compare_figures(
    first: dict[str, Figure], second: dict[str, Figure], seed: int
) -> dict[str, Any]:
    """Return both versions' figures of the same rows, and the difference with its interval; flags
    are left out."""
    content = {}
    for metric in first.keys() & second.keys():
        if metric.startswith("test_"):
            resamples = Resamples.draw(first[metric].rows, seed)
            found = difference(first[metric], second[metric], resamples)
            content[metric.removeprefix("test_")] = {
                "against": found.first,
                "candidate": found.second,
                "difference": found.value,
                "interval": list(found.interval),
                "p_value": found.p_value,
            }
    return dict(sorted(content.items()))


def make_candidate(
    store: ModelStore,
    database: Database,
    known: Known,
    runs: Path,
    root: Path,
    device: torch.device,
) -> Verdict | None:
    """Fit, publish, compare and promote a candidate of the labels that there are; None if that was
    done before."""
    name, parent = known.parent.manifest.name, known.parent.manifest
    manifest = fit_candidate(store, known, runs, device)
    promoted = {row["version"] for row in candidates(database, name) if row["promoted"]}
    if manifest.version in promoted:
        log.info("%s version %s was promoted, and rolled back since", name, manifest.version)
        return None
    verdict = judge(store, known, manifest, root)
    said = {"why": verdict.why, "control": verdict.control, "lost": verdict.lost}
    counts = known.provenance.rows, len(known.control)
    keep_candidate(database, name, manifest.version, parent.version, *counts, False, said)
    if verdict.is_promoted:
        store.set_alias(name, LATEST, manifest.version)
        keep_candidate(database, name, manifest.version, parent.version, *counts, True, said)
    outcome = "promoted" if verdict.is_promoted else verdict.why
    log.info("%s version %s: %s", name, manifest.version, outcome)
    return verdict
