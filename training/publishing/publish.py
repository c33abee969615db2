"""From a fitted model to a published version: export, check, calibrate, measure, publish."""

import platform
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors.torch import save

from model_store.artifacts.manifest import (
    ENCODER,
    GRAPHS,
    TOKENIZER,
    ClassSpec,
    Manifest,
    NoiseSpec,
    TargetSpec,
)
from model_store.artifacts.store import ModelStore
from model_store.scores.transforms import Transform
from model_store.types import DetectorNames
from training.calibration.categories import CategoriesWanted
from training.calibration.temperature import Temperature, set_temperature
from training.data import Dataset, Splits
from training.data.class_weights import class_shares
from training.export.graphs import export, parity, runtime_of
from training.export.quantise import quantisation_error, quantise_network, quantise_sampler
from training.export.served import fitted_detectors, fold
from training.facts import TemperatureFacts, TrainingFacts
from training.fitting.encoding import Encoding
from training.messages import log
from training.model import BayesianModel
from training.publishing.gate import check_gate
from training.publishing.nearest import training_rows
from training.publishing.quality import MeasuredRows
from training.publishing.stages import (
    Draft,
    Exported,
    HeldOut,
    calibrate_exported,
    measure_calibrated,
)
from training.publishing.trial import publish_draft
from training.recipe import Recipe
from training.scoring import draw_counts
from training.versions import WEIGHTS


def publish(
    store: ModelStore,
    name: str,
    model: BayesianModel,
    recipe: Recipe,
    data: Dataset,
    splits: Splits,
    facts: TrainingFacts,
    root: Path,
    transform: Transform | None = None,
    encoding: Encoding | None = None,
) -> Manifest:
    """Publish a fitted model as a new version of `name`; `root` is where relative data are.

    With a `transform` the targets of training and validation rows are transformed, as the model was
    fitted to them; with an `encoding` these rows are encoded.

    Raises:
        ParityError: if the exported graphs do not compute what the model computes; nothing is
            published.
        GateError: if the recipe's gate keeps it out; nothing is published.
        TrialError: if the service could not load it; nothing is published.
        InvalidInput: if the name is not fit for a model.
    """
    draft = assemble(model, recipe, data, splits, facts, transform, encoding)
    if recipe.gate is not None:
        check_gate(recipe, store, name, draft, measured_rows(recipe, data, splits), root)
    return publish_draft(store, name, draft)


def measured_rows(recipe: Recipe, data: Dataset, splits: Splits) -> MeasuredRows:
    """Return what the quality of a recipe's versions is measured on."""
    extent = data.minimum, data.maximum
    return MeasuredRows(
        splits.test, extent, data.classes, recipe.seed, data.group_names, data.input
    )


def assemble(
    model: BayesianModel,
    recipe: Recipe,
    data: Dataset,
    splits: Splits,
    facts: TrainingFacts,
    transform: Transform | None = None,
    encoding: Encoding | None = None,
) -> Draft:
    """Temper, export, check, calibrate and measure a fitted model; `transform` and `encoding` as of
    `publish`.

    Raises:
        ParityError: if the exported graphs do not compute what the model computes.
    """
    made: dict[str, Any] = {"data_digest": data.digest(), "python": platform.python_version()}
    temperature = tempered(model, recipe, splits)
    if temperature is not None:
        made["temperature"] = TemperatureFacts(**asdict(temperature))
    exported = replace(exported_model(model, recipe, data, splits, encoding), transform=transform)
    is_regression = recipe.task == "regression"
    # Rows of later times or other groups may have other shares of the classes: then those of the
    # calibration rows.
    are_alike = recipe.data.time is None and recipe.data.group is None
    labels = data.train.y if are_alike else np.concatenate([splits.reference.y, splits.ranking.y])
    shares = None if is_regression else class_shares(labels, len(data.classes))
    rows = HeldOut(splits.reference, splits.ranking, splits.test, shares)
    wanted = CategoriesWanted.by(recipe.serving.calibration, data, recipe.data.group_column)
    calibrated = calibrate_exported(exported, rows, recipe.seed, recipe.serving.risk, wanted)
    measured = measure_calibrated(calibrated, measured_rows(recipe, data, splits))
    target = TargetSpec(target=recipe.data.target or "y", transform=transform)
    priors = (
        () if is_regression else tuple(class_shares(splits.train.y, len(data.classes)).tolist())
    )
    output = target if is_regression else ClassSpec(classes=data.classes, priors=priors)
    return measured.draft(recipe.method, data.input, output, facts.model_copy(update=made))


def tempered(model: BayesianModel, recipe: Recipe, splits: Splits) -> Temperature | None:
    """Set a model's temperature and return it; None where its recipe wants none."""
    if not recipe.serving.temperature:
        return None
    temperature = set_temperature(
        model.eval(), splits.validation, recipe.training.validation_draws, recipe.seed
    )
    log.info("temperature %.4g", temperature.value)
    return temperature


def exported_model(
    model: BayesianModel,
    recipe: Recipe,
    data: Dataset,
    splits: Splits,
    encoding: Encoding | None = None,
) -> Exported:
    """Export a fitted model with its detectors, check what comes of it, and take integers where
    they are wanted and change nothing that could be told.

    Raises:
        ParityError: if the exported graphs do not compute what the model computes.
    """
    model = model.cpu().eval()
    fold(model)
    weights = {
        key: tensor.detach().clone().contiguous() for key, tensor in model.state_dict().items()
    }
    log.info("exporting")
    network = fitted_detectors(
        model, splits.train, recipe, data.shape if encoding is None else model.network.shape
    )
    # Columns are explained by their usual values; ids, and what an encoder says, by nothing.
    files = export(
        model, network, with_terms=not data.columns and not data.takes_ids and encoding is None
    )
    runtime = runtime_of(model, files)
    differences = parity(model, network, runtime, splits.validation)
    precision: Literal["float32", "int8"] = "float32"
    if recipe.serving.precision == "int8":
        integers = in_integers(model, files)
        quantised = runtime_of(model, integers)
        error = quantisation_error(runtime, quantised, splits.validation, recipe.serving.draws)
        differences |= asdict(error)
        if error.is_hidden:
            precision, runtime, files = "int8", quantised, integers
        else:
            log.info("integers move probabilities by more than Monte Carlo does: keeping float32")
    posterior = model.posterior
    draws = min(recipe.serving.draws, posterior.max_draws or recipe.serving.draws)
    more: dict[str, bytes | Path] = {}
    if encoding is not None:
        runtime.encoder = encoding.encoder
        more = {ENCODER: encoding.path}
    if data.tokenizer is not None:
        more[TOKENIZER] = data.tokenizer
    nearest = training_rows(splits.train, data, recipe, is_encoded=encoding is not None)
    return Exported(
        files={**files, WEIGHTS: save(weights), **nearest, **more},
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
    )


def in_integers(model: BayesianModel, graphs: dict[str, bytes]) -> dict[str, bytes]:
    """Return graphs with integers in their large products."""
    sampler, network = GRAPHS
    return {
        sampler: quantise_sampler(graphs[sampler], model.posterior.noise_dimension),
        network: quantise_network(graphs[network]),
    }
