"""`python -m training prune`: from a published version to a smaller one, calibrated and measured
anew."""

import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float32

from model_store.artifacts.manifest import GRAPHS, Manifest
from model_store.artifacts.store import ModelStore
from model_store.errors import InvalidInput
from model_store.inference.runtime import Runtime
from training.data import Dataset, split, split_sizes
from training.data.targets import transformed
from training.export.graphs import runtime_of
from training.facts import PruningFacts, TrainingFacts
from training.fitting.plots import plot_signal_to_noise
from training.messages import log
from training.publishing.pruning import is_weight, prune, signal_to_noise, strongest
from training.publishing.publish import assemble
from training.publishing.stages import Draft
from training.publishing.trial import publish_draft
from training.versions import WEIGHTS, Parent, refuse_made_by

TIMED_REQUESTS = 7


@dataclass(frozen=True)
class Pruned:
    """What was published, how much smaller it is, and the path of a plot of the ratios."""

    manifest: Manifest
    facts: PruningFacts
    plot: Path


def prune_version(
    store: ModelStore,
    parent: Parent,
    data: Dataset,
    fraction: float,
    name: str,
    runs: Path,
) -> Pruned:
    """Publish a version without its weights of lowest |mu| / sigma, as the next version of `name`.

    `data` are those of the parent's fit: calibration and quality are of its splits. A plot of the
    ratios is in a folder of `runs`.

    Raises:
        InvalidInput: if the model has no such ratios, the fraction cannot be removed, or the
            version is recalibrated: calibrating on the rows of its fit would undo that.
        ParityError: if the exported graphs do not compute what the model computes; nothing is
            published.
        TrialError: if the service could not load it; nothing is published.
    """
    refuse_made_by(parent.manifest, "recalibrated", "model")
    if parent.manifest.encoder is not None:
        raise InvalidInput(
            "model", "a version without an encoder", f"{parent.label}, which has one"
        )
    model = parent.model().eval()
    ratio, weights = signal_to_noise(model), is_weight(model)
    kept = strongest(model, fraction)
    folder = runs / f"{parent.manifest.name}-{parent.manifest.version}-pruned"
    folder.mkdir(parents=True, exist_ok=True)
    plot = folder / f"signal-to-noise-{fraction:g}.png"
    plot_signal_to_noise(ratio[weights].numpy(), fraction, plot, parent.label)
    smaller = prune(model, kept)
    left = int(weights[smaller.state_dict()["network.kept"].long()].sum())
    log.info("%s of %s weights are left", f"{left:,}", f"{int(weights.sum()):,}")

    transform = parent.manifest.transform
    splits = transformed(split(data, split_sizes(parent.recipe)), transform)
    facts = TrainingFacts.of(parent.manifest).derived()
    draft = assemble(smaller, parent.recipe, data, splits, facts, transform)
    graphs = store.open(parent.manifest.name, parent.manifest.version, wanted=GRAPHS).files
    files = {file: content for file, content in draft.files.items() if isinstance(content, bytes)}
    pair = [runtime_of(model, graphs), runtime_of(smaller, files)]
    row = splits.test.x[:1].astype(np.float32)
    before_ms, after_ms = request_times_ms(pair, row, draft.description.noise.default_draws)
    pruned = PruningFacts(
        **parent.facts.content(),
        fraction=fraction,
        weights=int(weights.sum()),
        kept_weights=left,
        parent_bytes=sum(parent.manifest.files[file].size for file in (*GRAPHS, WEIGHTS)),
        bytes=sum(len(files[file]) for file in (*GRAPHS, WEIGHTS)),
        parent_request_ms=before_ms,
        request_ms=after_ms,
    )
    facts = TrainingFacts.of(draft.description).derived(pruned=pruned)
    description = draft.description.model_copy(update={"training": facts.content()})
    return Pruned(publish_draft(store, name, Draft(description, draft.files)), pruned, plot)


def request_times_ms(
    runtimes: list[Runtime], row: Float32[np.ndarray, "1 I"], draws: int
) -> list[float]:
    """Return the median time of one row under fresh draws for each runtime, in milliseconds, taken
    in turns."""
    times: list[list[float]] = [[] for _ in runtimes]
    for seed in range(TIMED_REQUESTS + 1):
        for runtime, taken in zip(runtimes, times, strict=True):
            begun = time.perf_counter()
            runtime.run_set(row, runtime.draw_set(seed, draws))
            taken.append(1000 * (time.perf_counter() - begun))
    return [round(statistics.median(taken[1:]), 3) for taken in times]
