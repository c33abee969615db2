"""Publish a fitted model: export, check, calibrate, measure, publish."""

import platform
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from safetensors.numpy import save as save_arrays
from safetensors.torch import save

from model_store.artifacts.manifest import (
    ENCODER,
    GRAPHS,
    TOKENIZER,
    TRAINING_ROWS,
    ClassSpec,
    Manifest,
    NoiseSpec,
    TargetSpec,
)
from model_store.artifacts.store import LATEST, ModelStore
from model_store.inference.training_rows import MAX_ID_BYTES, TrainingRows
from model_store.types import DetectorNames
from training import log
from training.calibration.calibrate import CategoryChoice
from training.data import Dataset, Rows, Splits
from training.data.rows import class_shares
from training.export.graphs import export, load_runtime, parity
from training.export.quantise import quantisation_error, quantise_network, quantise_sampler
from training.export.served import fit_detectors, fold
from training.folders import data_root, hold
from training.provenance import Provenance
from training.publishing.baselines import add_baselines, check_constant
from training.publishing.draft import Draft, Exported, HeldOut, draft_version, publish_draft
from training.publishing.gate import check_gate
from training.publishing.quality import MeasuredRows
from training.recipe import Recipe
from training.scoring import draw_counts
from training.seeds import Stream, generator
from training.versions import WEIGHTS, manifests

if TYPE_CHECKING:
    from training.fit import Fitted

MAX_NUMBERS = 1 << 21  # in published training rows: 8 MB, or 2 MB of pixels


def publish(
    fitted: "Fitted",
    store: ModelStore,
    *,
    name: str | None = None,
    alias: str = LATEST,
    root: Path | None = None,
    anyway: bool = False,
    draft: Draft | None = None,
) -> Manifest:
    """Publish a fitted model as the next version of `name`, by default the recipe's.

    A run is published once, even if its process was killed after the publication. The recipe's gate
    and a table's baselines guard only `latest`: a model that is worse than the constant needs
    `anyway`.

    Args:
        root: the folder of data that the gate reads, by default DUBITO_DATA.
        draft: an earlier result of `assemble`.

    Raises:
        ParityError: if the exported graphs do not compute what the model computes.
        GateError: if the recipe's gate keeps it out, or it is worse than the constant.
        PreflightError: if the service could not load it.
        InvalidInput: if the name is not fit for a model.
        Nothing is published by any of these.
    """
    recipe, name = fitted.recipe, name or fitted.recipe.name
    with nullcontext() if fitted.folder is None else hold(fitted.folder, wait=True):
        manifest = _find_published(store, name, fitted.provenance.run)
        if manifest is None:
            draft = draft or assemble(fitted)
            if alias == LATEST and not anyway:
                check_constant(name, draft)
            if recipe.gate is not None and alias == LATEST:
                rows = quality_rows(recipe, fitted.data, fitted.splits)
                check_gate(recipe, store, name, draft, rows, root or data_root())
            manifest = publish_draft(store, name, draft, alias)
        fitted.discard_checkpoint()
    return manifest


def _find_published(store: ModelStore, name: str, run: str | None) -> Manifest | None:
    there = manifests(store, name) if run is not None else ()
    return next((manifest for manifest in there if Provenance.of(manifest).run == run), None)


def quality_rows(recipe: Recipe, data: Dataset, splits: Splits) -> MeasuredRows:
    extent, groups = (data.minimum, data.maximum), data.group_names
    return MeasuredRows(splits.test, extent, data.classes, recipe.seed, groups, data.input)


def assemble(fitted: "Fitted") -> Draft:
    """Export, check, calibrate and measure a fitted model, and a table's baselines."""
    return add_baselines(assemble_without_baselines(fitted), fitted)


def assemble_without_baselines(fitted: "Fitted") -> Draft:
    recipe, data, splits = fitted.recipe, fitted.data, fitted.splits
    shares = None
    output: TargetSpec | ClassSpec = TargetSpec(
        target=recipe.data.target or "y", transform=fitted.transform
    )
    if recipe.task == "classification":
        classes = len(data.classes)
        # Later rows or other groups may have other shares of the classes than the training rows.
        are_alike = recipe.data.time is None and recipe.data.group is None
        held_out = np.concatenate([splits.reference.y, splits.ranking.y])
        shares = class_shares(data.train.y if are_alike else held_out, classes)
        priors = tuple(class_shares(splits.train.y, classes).tolist())
        output = ClassSpec(classes=data.classes, priors=priors)
    return draft_version(
        _export(fitted),
        HeldOut(splits.reference, splits.ranking, splits.test, shares),
        quality_rows(recipe, data, splits),
        recipe.seed,
        recipe.serving.risk,
        CategoryChoice.from_config(recipe.serving.calibration, data, recipe.data.group_column),
        recipe.method,
        data.input,
        output,
        fitted.provenance.model_copy(
            update={"data_digest": data.digest(), "python": platform.python_version()}
        ),
    )


def _export(fitted: "Fitted") -> Exported:
    """Export a fitted model with its detectors and check parity.

    int8 graphs are used if the recipe asks for them and their error is below that of Monte Carlo.
    """
    recipe, data, splits, encoding = fitted.recipe, fitted.data, fitted.splits, fitted.encoding
    model = fitted.model.cpu().eval()
    fold(model)
    weights = {key: t.detach().clone().contiguous() for key, t in model.state_dict().items()}
    log.info("exporting")
    shape = data.shape if encoding is None else model.network.shape
    network = fit_detectors(model, splits.train, recipe, shape)
    # Columns are explained by their usual values; ids and encodings have no explanation.
    with_terms = not data.columns and not data.takes_ids and encoding is None
    files = export(model, network, with_terms=with_terms)
    runtime = load_runtime(model, files)
    differences = parity(model, network, runtime, splits.validation)
    precision: Literal["float32", "int8"] = "float32"
    posterior = model.posterior
    if recipe.serving.precision == "int8":
        sampler, predictor = GRAPHS
        integers = {
            sampler: quantise_sampler(files[sampler], posterior.noise_dimension),
            predictor: quantise_network(files[predictor]),
        }
        quantised = load_runtime(model, integers)
        error = quantisation_error(runtime, quantised, splits.validation, recipe.serving.draws)
        differences |= asdict(error)
        if error.is_hidden:
            precision, runtime, files = "int8", quantised, integers
        else:
            log.info("integers move probabilities by more than Monte Carlo does: keeping float32")
    draws = min(recipe.serving.draws, posterior.max_draws or recipe.serving.draws)
    more = nearest_rows(splits.train, data, recipe, is_encoded=encoding is not None)
    if encoding is not None:
        runtime.encoder = encoding.encoder
        more[ENCODER] = encoding.path
    if data.tokenizer is not None:
        more[TOKENIZER] = data.tokenizer
    return Exported(
        files={**files, WEIGHTS: save(weights), **more},
        encoder=None if encoding is None else encoding.spec,
        runtime=runtime,
        noise=NoiseSpec(
            algorithm=posterior.algorithm,
            dimension=posterior.noise_dimension,
            theta_dimension=posterior.theta_dimension,
            paired=model.network.is_paired,
            default_draws=draws,
            max_draws=posterior.max_draws,
        ),
        detectors=DetectorNames(
            tuple(recipe.combined),
            tuple(network.density),
            network.two_sided,
            attributed=network.attributed if runtime.has_terms else (),
        ),
        draw_counts=tuple(draw_counts(draws)),
        num_labels=max(len(data.classes), 1),
        precision=precision,
        parity=differences,
        transform=fitted.transform,
    )


def nearest_rows(
    train: Rows, data: Dataset, recipe: Recipe, is_encoded: bool = False
) -> dict[str, bytes | Path]:
    """Return the file of random training rows from which explanations name the nearest.

    Distances use encoded columns, pixel values, or numbers and encodings in standard deviations.
    Rows of ids have no distance, so they have no file.
    """
    count = min(recipe.serving.nearest_rows, max(1, MAX_NUMBERS // train.x.shape[1]))
    if count == 0 or (data.takes_ids and not is_encoded):
        return {}
    index = np.sort(generator(recipe.seed, Stream.NEAREST_ROWS).permutation(len(train))[:count])
    chosen = train.take(index)
    scale = np.ones(train.x.shape[1], dtype=np.float32)
    if is_encoded or (not data.columns and data.image is None):
        std = chosen.x.astype(np.float64).std(axis=0).astype(np.float32)
        scale = np.where(std > 0, std, scale)
    ids = index if chosen.ids is None else chosen.ids
    shown = MAX_ID_BYTES // len(chosen)
    names = tuple(str(name).encode()[:shown].decode(errors="ignore") for name in ids.tolist())
    return {TRAINING_ROWS: save_arrays(TrainingRows(chosen.x, scale, names).tensors())}
