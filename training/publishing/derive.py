"""Pruning and recalibration of published versions."""

import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float32
from safetensors.numpy import load as load_arrays
from safetensors.numpy import save as save_arrays

from model_store.artifacts.manifest import GRAPHS, TOKENIZER, Manifest, NoiseSpec
from model_store.artifacts.store import Artifact, ModelStore
from model_store.errors import InvalidInput
from model_store.inference.model import Model
from model_store.inference.runtime import Runtime
from training import log
from training.calibration.calibrate import CategoryChoice
from training.calibration.temperature import choose_temperature, max_rows_for
from training.data import Dataset, Rows, split, split_sizes
from training.data.rows import class_shares
from training.data.targets import apply_transform, transform_splits
from training.evaluation import figures
from training.export.graphs import temper_graph
from training.fit import Fitted, temper
from training.model import get_likelihood
from training.provenance import Provenance, Pruning, Recalibration, Record, TemperatureChoice
from training.publishing.baselines import CLEAR_ERRORS, LOG_LIKELIHOOD, check_constant
from training.publishing.draft import Draft, Exported, HeldOut, draft_version, publish_draft
from training.publishing.pruning import is_weight, prune, select_strongest
from training.publishing.publish import assemble
from training.publishing.quality import MeasuredRows
from training.recipe import override
from training.seeds import Stream, generator, hash_key
from training.versions import (
    WEIGHTS,
    Parent,
    load_unfitted,
    match_version,
    read_recipe,
    refuse_derived,
)

TIMED_REQUESTS = 7
TEMPERATURE = "likelihood.temperature"  # among the weights


def prune_version(
    store: ModelStore,
    parent: Parent,
    data: Dataset,
    fraction: float,
    name: str,
    anyway: bool = False,
) -> tuple[Manifest, Pruning]:
    """Prune the weights with the lowest |mu| / sigma, and publish the next version of `name`.

    `data` must be the data of the parent's fit. Its splits calibrate and test the new version.
    """
    refuse_derived(parent.manifest, "recalibrated", "model")
    if parent.manifest.encoder is not None:
        expected = "a version without an encoder"
        raise InvalidInput("model", expected, f"{parent.label} with an encoder")
    model = parent.model().eval()
    weights, mask = is_weight(model), select_strongest(model, fraction)
    smaller = prune(model, mask)
    kept_weights = int(weights[smaller.state_dict()["network.kept"].long()].sum())
    log.info("%s of %s weights are left", f"{kept_weights:,}", f"{int(weights.sum()):,}")

    recipe, transform = parent.recipe, parent.manifest.transform
    splits = transform_splits(split(data, split_sizes(recipe)), transform)
    provenance = Provenance.of(parent.manifest).derived()
    temperature = temper(smaller, recipe, splits.validation)
    if temperature is not None:
        provenance = provenance.model_copy(update={"temperature": temperature})
    draft = assemble(Fitted(smaller, recipe, data, splits, provenance, transform))
    if not anyway:
        check_constant(name, draft)
    graphs = store.open(parent.manifest.name, parent.manifest.version, files=GRAPHS).files
    files = {file: content for file, content in draft.files.items() if isinstance(content, bytes)}
    parent_ms, request_ms = request_times_ms(
        [
            _load_runtime(parent.manifest.noise, graphs),
            _load_runtime(draft.description.noise, files),
        ],
        splits.test.x[:1].astype(np.float32),
        draft.description.noise.default_draws,
    )
    pruned = Pruning(
        **parent.provenance.content(),
        fraction=fraction,
        weights=int(weights.sum()),
        kept_weights=kept_weights,
        parent_bytes=sum(parent.manifest.files[file].size for file in (*GRAPHS, WEIGHTS)),
        bytes=sum(len(files[file]) for file in (*GRAPHS, WEIGHTS)),
        parent_request_ms=parent_ms,
        request_ms=request_ms,
    )
    provenance = Provenance.of(draft.description).derived(pruned=pruned)
    loss_warnings = warn_of_loss(parent, draft.figures[LOG_LIKELIHOOD])
    warnings = (*draft.description.warnings, *loss_warnings)
    update = {"training": provenance.content(), "warnings": warnings}
    description = draft.description.model_copy(update=update)
    return publish_draft(store, name, Draft(description, draft.files)), pruned


def _load_runtime(noise: NoiseSpec, files: dict[str, bytes]) -> Runtime:
    sampler, network = (files[name] for name in GRAPHS)
    return Runtime(
        sampler,
        network,
        noise.dimension,
        algorithm=noise.algorithm,
        paired=noise.paired,
        on_processors=True,
    )


def warn_of_loss(parent: Parent, log_likelihood: figures.Figure) -> Iterator[str]:
    """Warn if the test log-likelihood is clearly below the parent's."""
    before, current = parent.manifest.quality[LOG_LIKELIHOOD], log_likelihood.value
    error = float(log_likelihood.row_values.std()) / math.sqrt(log_likelihood.rows)
    if before - current > CLEAR_ERRORS * error:
        warning = (
            f"a log-likelihood of {current:.4g} nats per test row, compared with {before:.4g} "
            "before pruning"
        )
        log.warning("%s", warning)
        yield warning


def request_times_ms(
    runtimes: list[Runtime], row: Float32[np.ndarray, "1 I"], draws: int
) -> list[float]:
    """Measure each runtime's median time for one row with new draws, in milliseconds."""
    times: list[list[float]] = [[] for _ in runtimes]
    for seed in range(TIMED_REQUESTS + 1):
        for runtime, times_ms in zip(runtimes, times, strict=True):
            start_s = time.perf_counter()
            runtime.run_set(row, runtime.draw_set(seed, draws))
            times_ms.append(1000 * (time.perf_counter() - start_s))
    return [round(statistics.median(times_ms[1:]), 3) for times_ms in times]


def load_for_version(parent: Artifact, root: Path, source: str, target: str | None) -> Dataset:
    """Load a source with a published model's columns, tokenizer, classes and input shape."""
    manifest = parent.manifest
    recipe = override(read_recipe(manifest, "model"), source=source, target=target, leave_out=[])
    loaded = load_unfitted(recipe, root, manifest.input.columns, parent.files.get(TOKENIZER))
    data = match_version(loaded, manifest, "data.source")
    if data.digest() == Provenance.of(manifest).data_digest:
        expected = f"rows that {manifest.label} was not fitted on"
        raise InvalidInput("data.source", expected, "the data of its fit")
    return data


def split_rows(
    data: Dataset, reference_rows: int, ranking_rows: int, seed: int, validation_rows: int = 0
) -> HeldOut:
    """Split rows at random into calibration, temperature and test rows."""
    rows = data.rows
    for field, number in (("--reference-rows", reference_rows), ("--ranking-rows", ranking_rows)):
        if number < 1:
            raise InvalidInput(field, "at least 1", f"{number}")
    held_out = reference_rows + ranking_rows + validation_rows
    if held_out >= len(rows):
        expected = f"fewer than the {len(rows)} rows of the source, because some must test"
        field = "--reference-rows + --ranking-rows"
        field += " + rows for the temperature" if validation_rows else ""
        raise InvalidInput(field, expected, f"{held_out}")
    order = generator(seed, Stream.SPLIT).permutation(len(rows))
    parts = np.split(order, np.cumsum([reference_rows, ranking_rows, validation_rows]))
    shares = class_shares(rows.y, len(data.classes)) if data.classes else None
    reference, ranking, validation, test = (rows.take(part) for part in parts)
    return HeldOut(reference, ranking, test, shares, validation if validation_rows else None)


def refit_temperature(
    parent: Artifact, rows: Rows, seed: int
) -> tuple[Artifact, TemperatureChoice]:
    """Refit a version's temperature on other rows (see `training.calibration.temperature`).

    The version stays unchanged if no other temperature is clearly better.
    """
    manifest, runtime = parent.manifest, Model.load(parent).runtime
    recipe = read_recipe(manifest, "model")
    likelihood = get_likelihood(recipe, len(manifest.classes or ()))
    draws = manifest.noise.default_draws
    rows = rows.take(np.arange(min(len(rows), max_rows_for(likelihood, draws))))
    y = rows.y if manifest.transform is None else apply_transform(manifest.transform, rows.y)
    draw_set = runtime.draw_set(hash_key(seed, Stream.TEMPERATURE), draws)
    outputs, _ = runtime.run_set(rows.x.astype(np.float32), draw_set)
    tensors = torch.from_numpy(outputs).double(), torch.from_numpy(y)
    temperature = choose_temperature(likelihood, *tensors)
    weights = load_arrays(parent.files[WEIGHTS])
    before = float(weights[TEMPERATURE])
    log.info("temperature %.4g, before %.4g", before * temperature.value, before)
    choice = temperature.model_copy(
        update={"value": before * temperature.value, "fitted": before * temperature.fitted}
    )
    if temperature.value == 1.0:
        return parent, choice
    _, network = GRAPHS
    weights[TEMPERATURE] = np.array(choice.value, dtype=np.float32)
    changed = {
        network: temper_graph(parent.files[network], temperature.value),
        WEIGHTS: save_arrays(weights),
    }
    return replace(parent, files={**parent.files, **changed}), choice


def recalibrate(
    store: ModelStore,
    parent: Artifact,
    data: Dataset,
    rows: HeldOut,
    seed: int,
    name: str,
    origin: dict[str, str],
) -> Manifest:
    """Calibrate and test a version on other rows, and publish it as the next version of `name`.

    Graphs and weights do not change, except that validation rows, if any, refit the temperature.
    `origin` contains the `source` of the rows, and the `target` if it is set.
    """
    manifest, categories = parent.manifest, parent.manifest.categories
    kind = "marginal" if categories is None else categories.kind
    column = None if categories is None else categories.column
    records: dict[str, Record] = {}
    if rows.validation is not None:
        parent, records["temperature"] = refit_temperature(parent, rows.validation, seed)
    records["recalibrated"] = Recalibration(
        name=manifest.name,
        version=manifest.version,
        **origin,
        rows=len(data.rows),
        test_rows=len(rows.test),
        seed=seed,
        data_digest=data.digest(),
    )
    extent, classes = (data.minimum, data.maximum), manifest.classes or ()
    draft = draft_version(
        Exported.from_artifact(parent),
        rows,
        MeasuredRows(rows.test, extent, classes, seed, data.group_names, data.input),
        seed,
        None if manifest.abstention is None else manifest.abstention.risk,
        CategoryChoice.from_config(kind, data, column),
        manifest.method,
        manifest.input,
        manifest.output,
        Provenance.of(manifest).derived(**records),
    )
    return publish_draft(store, name, draft)
