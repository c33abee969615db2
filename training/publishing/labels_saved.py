"""How many labels acquisition has saved: versions fitted on rows that a score chose, and on as many
of control rows.

Both begin at the version before any labels. m control labels are fitted, and the first m/4, m/2,
3m/4 and m of those that a score chose. Where the log-likelihood of the test rows (nats a row) first
reaches that of the control labels' version, so many chosen labels were as good, by straight lines
between the fits. The rest of m is what was saved. Its interval is the bootstrap's over test rows.
What another fit, or other labels, would change is not in it.
"""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float64

from model_store.artifacts.store import ModelStore
from model_store.errors import NotFound
from model_store.scores.classification import Scores
from model_store.scores.regression import log_density
from model_store.scores.tasks import predictive_of
from model_store.state.live import FEWEST
from training.data import Rows
from training.evaluation.figures import Resamples, percentiles
from training.facts import TrainingFacts
from training.messages import log
from training.posteriors import noise
from training.publishing.candidate import Fitted, Known, fitted, more_rows
from training.publishing.publish import tempered
from training.scoring import log_probability
from training.seeds import Stream
from training.versions import Parent, open_parent

PARTS = (0.25, 0.5, 0.75, 1.0)  # of the control labels' number


def labels_saved(
    store: ModelStore, found: Known, runs: Path, device: torch.device
) -> dict[str, Any] | None:
    """Return how many fewer chosen labels were as good as the control labels; None where it cannot
    be told.

    Fits the recipe six times.
    """
    rows = min(len(found.control), len(found.chosen))
    if rows < FEWEST:
        counted = f"{len(found.control)} control and {len(found.chosen)} chosen labels"
        log.info("labels saved: not measured with %s, needs %d of each", counted, FEWEST)
        return None
    try:
        root = before_labels(store, found.parent)
    except NotFound:
        log.info("labels saved: not measured, since the version before any labels was deleted")
        return None
    counts = [0, *(round(part * rows) for part in PARTS)]
    chosen = [
        _likelihoods(root, found, found.chosen.take(np.arange(n)), runs, device) for n in counts
    ]
    control = _likelihoods(root, found, found.control.take(np.arange(rows)), runs, device)
    resamples = Resamples.of(len(control), found.parent.recipe.seed)
    table = np.stack([*chosen, control], axis=1)
    sampled = [
        as_good(counts, sums[:-1], float(sums[-1]))
        for sums in resamples.values(lambda w: w @ table)
    ]
    needed = as_good(counts, table[:, :-1].sum(axis=0), float(control.sum()))
    low, high = percentiles(rows - np.array(sampled))
    log.info(
        "labels saved: %.0f of %d (95 %% interval %.0f to %.0f)", rows - needed, rows, low, high
    )
    means = {str(n): float(values.mean()) for n, values in zip(counts, chosen, strict=True)}
    return {
        "control_labels": rows,
        "as_good_labels": needed,
        "value": rows - needed,
        "interval": [low, high],
        "log_likelihood": {"control": float(control.mean()), "chosen": means},
    }


def as_good(counts: list[int], likelihoods: Float64[np.ndarray, "P"], wanted: float) -> float:
    """Return how many labels first reach a likelihood, by straight lines between counts; the most
    where none does."""
    if likelihoods[0] >= wanted:
        return float(counts[0])
    for (first, low), (last, high) in pairwise(zip(counts, likelihoods.tolist(), strict=True)):
        if high >= wanted:
            return float(first + (last - first) * (wanted - low) / (high - low))
    return float(counts[-1])


def before_labels(store: ModelStore, parent: Parent) -> Parent:
    """Return the version that a chain of candidates began at.

    Raises:
        NotFound: if it was deleted.
    """
    while True:
        facts = TrainingFacts.of(parent.manifest)
        if facts.labels is None or facts.warm_start is None:
            return parent
        parent = open_parent(store, f"{facts.warm_start.name}:{facts.warm_start.version}", "NAME")


def _likelihoods(
    root: Parent, found: Known, rows: Rows, runs: Path, device: torch.device
) -> Float64[np.ndarray, "N"]:
    """Return the log-likelihood of each test row after a fit on the data and some labelled rows."""
    splits = replace(found.splits, train=more_rows(found.splits.train, rows))
    made = fitted(root, found.data, splits, runs, device, "arm")
    tempered(made.model, made.recipe, made.splits)
    return _of_test_rows(made, found.splits.test)


@torch.no_grad()
def _of_test_rows(made: Fitted, test: Rows) -> Float64[np.ndarray, "N"]:
    model, recipe = made.model.cpu().eval(), made.recipe
    x = test.x if made.encoding is None else made.encoding.encoder.rows(test.x, True)
    draws = min(recipe.serving.draws, model.posterior.max_draws or recipe.serving.draws)
    eps = noise(model.posterior, draws, recipe.seed, Stream.VALIDATION_NOISE)
    outputs = model.predict(torch.from_numpy(np.ascontiguousarray(x)).float(), eps).numpy()
    if recipe.task == "regression":
        return log_density(outputs, test.y.astype(np.float64), made.transform)
    predictive = predictive_of(recipe.task, made.transform)
    scores = predictive.scores(predictive.sums(outputs), standard_errors=False)
    assert isinstance(scores, Scores)
    return log_probability(scores, test.y)
