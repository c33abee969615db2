"""How many labels acquisition has saved: versions fitted on rows that a score chose, and on as many
control rows.

Both begin at the version before any labels. m control labels are fitted, and the first m/4, m/2,
3m/4 and m of those that a score chose. Where the log-likelihood of the test rows (nats a row) first
reaches that of the control labels' version, as many chosen labels were as good, by straight lines
between the fits. The rest of m is what was saved. Its interval is the bootstrap's over test rows.
What another fit, or other labels, would change is not in it.
"""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float64

from model_store.artifacts.store import ModelStore
from model_store.errors import NotFound
from model_store.state.live import FEWEST
from training import log
from training.candidate import Known
from training.data import Rows
from training.evaluation.figures import Resamples, percentiles
from training.fit import fit
from training.provenance import Provenance
from training.versions import Parent, open_parent

PARTS = (0.25, 0.5, 0.75, 1.0)  # of the control labels' number


def labels_saved(
    store: ModelStore, known: Known, runs: Path, device: torch.device
) -> dict[str, Any] | None:
    """Return how many fewer chosen labels were as good as the control labels; None where it cannot
    be told.

    Fits the recipe six times.
    """
    rows = min(len(known.control), len(known.chosen))
    if rows < FEWEST:
        counted = f"{len(known.control)} control and {len(known.chosen)} chosen labels"
        log.info("labels saved: not measured with %s, needs %d of each", counted, FEWEST)
        return None
    try:
        root = before_labels(store, known.parent)
    except NotFound:
        log.info("labels saved: not measured, since the version before any labels was deleted")
        return None

    def likelihoods(labelled: Rows, count: int) -> Float64[np.ndarray, "N"]:
        extra = labelled.take(np.arange(count))
        fitted = fit(
            root.recipe, known.data, start=root, extra=extra, device=device, runs=runs, quiet=True
        )
        fitted.discard_checkpoint()
        return fitted.log_likelihood(fitted.splits.test)

    counts = [0, *(round(part * rows) for part in PARTS)]
    chosen = [likelihoods(known.chosen, n) for n in counts]
    control = likelihoods(known.control, rows)
    resamples = Resamples.of(len(control), known.parent.recipe.seed)
    table = np.stack([*chosen, control], axis=1)
    sums = resamples.values(lambda weights: weights @ table)
    sampled = [as_good(counts, of[:-1], float(of[-1])) for of in sums]
    needed = as_good(counts, table[:, :-1].sum(axis=0), float(control.sum()))
    low, high = percentiles(rows - np.array(sampled))
    said = "labels saved: %.0f of %d (95 %% interval %.0f to %.0f)"
    log.info(said, rows - needed, rows, low, high)
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
    while True:
        made = Provenance.of(parent.manifest)
        if made.labels is None or made.warm_start is None:
            return parent
        parent = open_parent(store, f"{made.warm_start.name}:{made.warm_start.version}", "NAME")
