"""From labels that came to the service to a candidate: fitted on old and new rows, compared,
promoted.

A candidate begins at the weights of what `latest` names, and is fitted on that version's training
rows and on all labelled rows that were not set aside; each counts as one row. Validation,
calibration and test rows stay what they were. It is published under the alias `candidate`, whatever
comes of it.

`latest` moves to it if it is no worse than what that named, beyond chance, on the test rows and,
where there are enough, on labelled control rows, which no fit sees; and if every label came with a
key.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool

from model_store.artifacts.manifest import TOKENIZER, Manifest
from model_store.artifacts.store import LATEST, ModelStore
from model_store.conformal.mondrian import UNKNOWN
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
from training.data import Dataset, Rows, Splits, split, split_sizes
from training.data.class_weights import class_weights
from training.data.targets import log_slope_of, transformed
from training.evaluation.comparison import difference
from training.evaluation.figures import Figure
from training.evaluation.intervals import Resamples
from training.facts import LabelFacts, TrainingFacts
from training.fitting.encoding import Encoding, with_encoder
from training.fitting.laplace import check_trained
from training.fitting.run import Run, training_facts
from training.fitting.target_choice import target_choice
from training.fitting.warm_start import check_compatible
from training.messages import log
from training.model import BayesianModel
from training.publishing.gate import GateError, check_gate, worse_beyond_chance
from training.publishing.publish import assemble, measured_rows
from training.publishing.quality import Measurable
from training.publishing.stages import Draft
from training.publishing.trial import publish_draft
from training.recipe import GateSection, Recipe
from training.versions import Parent, fitted_data, open_parent

CANDIDATE = "candidate"
NO_WORSE = "no worse"
UNKNOWN_KEYS = (
    "some labels came without a key, so a person has to promote it: "
    "`python -m model_store alias {name} latest {version}`"
)
# What a candidate must be no worse in, and by how much it may be, where its recipe has no gate.
GATES: dict[str, dict[str, float]] = {
    "classification": {"test_accuracy": 0.0, "test_log_likelihood": 0.01},
    "regression": {"test_rmse": 0.0, "test_log_likelihood": 0.01},
}


@dataclass(frozen=True, eq=False)
class Known:
    """What a candidate is made of: the version before it, its data, and the labels that have come
    since."""

    parent: Parent
    data: Dataset
    splits: Splits  # of the data alone
    labels: LabelledRows
    usable: Bool[np.ndarray, "N"]  # which labelled rows can be fitted or measured on
    facts: LabelFacts

    @property
    def train(self) -> Rows:
        """Labelled rows to be fitted."""
        return self._rows(self.usable & ~self.labels.is_control)

    @property
    def chosen(self) -> Rows:
        """Those of `train` that a score chose."""
        return self._rows(self.usable & self.labels.is_chosen)

    @property
    def control(self) -> Rows:
        """Labelled rows that were set aside."""
        return self._rows(self.usable & self.labels.is_control)

    def _rows(self, chosen: Bool[np.ndarray, "N"]) -> Rows:
        index = np.flatnonzero(chosen)
        values = [self.labels.values[i] for i in index]
        number = {name: c for c, name in enumerate(self.data.classes)}
        y = (
            np.array([number[str(value)] for value in values], dtype=np.int64)
            if self.data.classes
            else np.array(values, dtype=np.float32)
        )
        return Rows(
            self.labels.x[index], y, np.array([self.labels.ids[i] for i in index], dtype=str)
        )


def known(
    store: ModelStore, database: Database, name: str, root: Path, source: str | None = None
) -> Known:
    """Return what there is to make a candidate of; `source` is where the data are, if not where
    they were.

    Raises:
        NotFound: if there is no such model.
        InvalidInput: if its data are not there, or are others.
    """
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
    facts = LabelFacts(
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


def more_rows(rows: Rows, more: Rows) -> Rows:
    """Return rows with others behind them; bytes stay bytes where the others are such."""
    as_bytes = rows.x.dtype == np.uint8 and bool(
        ((more.x >= 0) & (more.x <= 255) & (more.x % 1 == 0)).all()
    )
    x = np.concatenate(
        [
            rows.x if as_bytes else rows.x.astype(np.float32),
            more.x.astype(rows.x.dtype) if as_bytes else more.x,
        ]
    )
    ids = (
        None
        if rows.ids is None or more.ids is None
        else np.concatenate([rows.ids.astype(str), more.ids])
    )
    groups = (
        None if rows.groups is None else np.concatenate([rows.groups, np.full(len(more), UNKNOWN)])
    )
    return Rows(x, np.concatenate([rows.y, more.y.astype(rows.y.dtype)]), ids, groups)


@dataclass(frozen=True, eq=False)
class Fitted:
    """A model that was fitted, with all that its publication needs."""

    model: BayesianModel
    recipe: Recipe
    splits: Splits
    facts: TrainingFacts
    transform: Transform | None
    encoding: Encoding | None


def fitted(
    parent: Parent, data: Dataset, splits: Splits, runs: Path, device: torch.device, tag: str
) -> Fitted:
    """Fit a version's recipe on, from its weights, on these splits; a run that was killed is taken
    up.

    `tag` tells runs apart that begin at one version.
    """
    recipe, encoding = with_encoder(parent.recipe, data, splits.train, runs, parent)
    check_compatible(recipe, data, parent)
    check_trained(recipe, parent)
    encoded = None if encoding is None else encoding.spec.outputs
    begins_at = sha256(parent.weights).hexdigest()
    rows = sha256(np.ascontiguousarray(splits.train.x).data).hexdigest()
    targets = sha256(np.ascontiguousarray(splits.train.y).data).hexdigest()
    run_id = sha256(
        f"{recipe.digest()} {begins_at} {rows} {targets} {device.type}".encode()
    ).hexdigest()[:12]
    folder = runs / f"{recipe.name}-{tag}-{run_id}"
    folder.mkdir(parents=True, exist_ok=True)
    splits = splits if encoding is None else encoding.of(splits, quiet=True)
    choice = target_choice(recipe, data, splits, folder, device, parent, encoded)
    own_units, splits = splits, transformed(splits, choice.transform)
    weights = (
        None
        if recipe.data.class_weights is None
        else class_weights(recipe.data.class_weights, data.classes, splits.train.y)
    )
    largest_id = int(data.maximum) if data.takes_ids and encoding is None else None
    run = Run(
        recipe,
        splits,
        data.shape,
        len(data.classes),
        folder,
        device,
        parent,
        weights,
        encoded,
        largest_id,
    )
    model = run.fit(quiet=True)
    facts = training_facts(run, splits, log_slope_of(choice.transform, own_units.validation.y))
    run.checkpoint.unlink(missing_ok=True)
    return Fitted(model, recipe, splits, facts, choice.transform, encoding)


def fit_candidate(store: ModelStore, found: Known, runs: Path, device: torch.device) -> Manifest:
    """Fit and publish a candidate, unless there is one of these labels and this parent already."""
    name = found.parent.manifest.name
    for version in reversed(store.versions(name)):
        with suppress(StoreError):
            manifest = store.manifest(name, version)
            facts = TrainingFacts.of(manifest)
            is_same = facts.labels is not None and facts.labels.digest == found.facts.digest
            if is_same and facts.warm_start == found.parent.facts:
                log.info("%s version %s was fitted on these labels", name, version)
                store.set_alias(name, CANDIDATE, version)
                return manifest
    splits = replace(found.splits, train=more_rows(found.splits.train, found.train))
    log.info(
        "fitting %d + %d rows from %s",
        len(found.splits.train),
        len(found.train),
        found.parent.label,
    )
    made = fitted(found.parent, found.data, splits, runs, device, CANDIDATE)
    facts = made.facts.model_copy(update={"labels": found.facts})
    draft = assemble(
        made.model, made.recipe, found.data, made.splits, facts, made.transform, made.encoding
    )
    manifest = publish_draft(store, name, draft, CANDIDATE)
    log.info("published %s version %s as %s", name, manifest.version, CANDIDATE)
    return manifest


def labels_tried(store: ModelStore, database: Database, name: str) -> int:
    """Return how many labels the served version was fitted on, or the candidate if it was judged
    already."""
    judged = {
        row["version"]
        for row in candidates(database, name)
        if row["promoted"] or row["why"] != NO_WORSE
    }
    aliases = store.aliases(name)
    versions = {
        aliases.get(LATEST),
        aliases.get(CANDIDATE) if aliases.get(CANDIDATE) in judged else None,
    }
    return max(
        (labels_of(store, name, version) for version in versions if version is not None), default=0
    )


def labels_of(store: ModelStore, name: str, version: str) -> int:
    """Return how many labels a version (a number) was fitted on."""
    labels = TrainingFacts.of(store.manifest(name, version)).labels
    return 0 if labels is None else labels.rows


@dataclass(frozen=True)
class Verdict:
    """Whether a candidate may take the place of the version before it, and why not if it may
    not."""

    is_promoted: bool
    why: str
    control: dict[str, Any] | None


def judged(store: ModelStore, found: Known, manifest: Manifest, root: Path) -> Verdict:
    """Compare a published candidate with its parent, on test rows and on control rows."""
    name, recipe = manifest.name, found.parent.recipe
    gate = GateSection(against=LATEST, metrics=GATES[recipe.task])
    if recipe.gate is not None:
        gate = recipe.gate.model_copy(update={"against": LATEST})
    gated = recipe.model_copy(update={"gate": gate})
    artifact = store.open(name, manifest.version, (*NEEDED, TOKENIZER))
    mine = Measurable.of(Model.load(artifact))
    rows = measured_rows(recipe, found.data, found.splits)
    draft = Draft(artifact.manifest, dict(artifact.files), mine.figures(rows))
    why = ""
    try:
        check_gate(gated, store, name, draft, rows, root)
    except GateError as error:
        why = str(error)
    control = None
    if len(found.control) < FEWEST:
        log.info(
            "%d labelled control rows are too few to compare on (%d)", len(found.control), FEWEST
        )
    else:
        its = Measurable.of(Model.load(store.open(name, found.parent.manifest.version, NEEDED)))
        on_control = replace(rows, test=found.control)
        figures, others = mine.figures(on_control), its.figures(on_control)
        control = {"rows": len(found.control), "figures": compared(others, figures, recipe.seed)}
        label = f"{LATEST} (version {found.parent.manifest.version})"
        worse = worse_beyond_chance(gate, figures, others, label, recipe.seed, "control rows")
        if worse:
            why = "\n".join([*([why] if why else []), "on control rows it is worse in", *worse])
    if not why and not found.labels.are_known:
        why = UNKNOWN_KEYS.format(name=name, version=manifest.version)
    return Verdict(not why, why or NO_WORSE, control)


def compared(first: dict[str, Figure], second: dict[str, Figure], seed: int) -> dict[str, Any]:
    """Return both versions' figures of the same rows, and the difference with its interval; flags
    are left out."""
    content = {}
    for metric in first.keys() & second.keys():
        if metric.startswith("test_"):
            found = difference(
                first[metric], second[metric], Resamples.of(first[metric].rows, seed)
            )
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
    found: Known,
    runs: Path,
    root: Path,
    device: torch.device,
    saved: Callable[[], dict[str, Any] | None] = lambda: None,
) -> Verdict | None:
    """Fit, publish, compare and promote a candidate of the labels that there are; None if that was
    done before.

    `saved` measures how many labels acquisition has saved, where that is asked for.
    """
    name, parent = found.parent.manifest.name, found.parent.manifest
    manifest = fit_candidate(store, found, runs, device)
    if any(
        row["version"] == manifest.version and row["promoted"] for row in candidates(database, name)
    ):
        log.info("%s version %s was promoted, and rolled back since", name, manifest.version)
        return None
    verdict = judged(store, found, manifest, root)
    said = {"why": verdict.why, "control": verdict.control, "labels_saved": saved()}
    counts = found.facts.rows, len(found.control)
    keep_candidate(database, name, manifest.version, parent.version, *counts, False, said)
    if verdict.is_promoted:
        store.set_alias(name, LATEST, manifest.version)
        keep_candidate(database, name, manifest.version, parent.version, *counts, True, said)
    log.info(
        "%s version %s: %s",
        name,
        manifest.version,
        "promoted" if verdict.is_promoted else verdict.why,
    )
    return verdict
