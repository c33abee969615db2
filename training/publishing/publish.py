"""From a fitted model to a published version: export, check, calibrate, measure, publish."""

import platform
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Literal

import numpy as np
import torch
from safetensors.numpy import save as save_arrays
from safetensors.torch import save as save_tensors

from model_store.artifacts.manifest import (
    AbstentionSpec,
    ClassSpec,
    Description,
    DetectorSpec,
    Manifest,
    NoiseSpec,
    TargetSpec,
)
from model_store.artifacts.store import ModelStore
from model_store.conformal.abstention import CONFIDENCE
from model_store.conformal.calibration import Calibration
from model_store.conformal.detectors import DetectorNames
from model_store.errors import InvalidInput
from model_store.inference.model import detector_scores
from model_store.inference.runtime import Runtime
from model_store.scores.classification import Scores
from model_store.scores.tasks import labels_of
from training.calibration.calibrate import calibrate
from training.calibration.temperature import set_temperature
from training.data import Dataset, Rows, Splits
from training.evaluation.metrics import quality, regression_quality
from training.export.graphs import export, parity, runtime_of
from training.export.quantise import quantisation_error, quantise_network, quantise_sampler
from training.export.served import ServedNetwork, served_network
from training.nn.flows import WeightNormLinear
from training.nn.model import BayesianModel
from training.publishing.gate import check_gate
from training.recipe import DENSITY_NAMES, Recipe
from training.scoring import draw_counts, rows_per_draw_set, scores_and_likelihoods, served_scores
from training.seeds import ServedRows, Stream, generator, hash_key

MEASURED_ROWS = 16  # rows that share draws when quality is measured
NOISE_ROWS = 1000


def publish(
    store: ModelStore,
    name: str,
    model: BayesianModel,
    recipe: Recipe,
    data: Dataset,
    splits: Splits,
    facts: dict[str, Any],
    say: Callable[[str], None],
) -> Manifest:
    """Publish what `assemble` makes as a new version of `name`.

    Raises:
        ParityError: if the exported graphs do not compute what the model computes; nothing is published.
        GateError: if the recipe's gate keeps it out; nothing is published.
        InvalidInput: if the name is not fit for a model.
    """
    description, files = assemble(model, recipe, data, splits, facts, say)
    if recipe.gate is not None:
        check_gate(recipe.gate, store, name, description, say)
    return store.publish(name, description, files)


def assemble(
    model: BayesianModel,
    recipe: Recipe,
    data: Dataset,
    splits: Splits,
    facts: dict[str, Any],
    say: Callable[[str], None],
) -> tuple[Description, dict[str, bytes]]:
    """Export, check, calibrate and measure a fitted model; return its description and the files of a version.

    Raises:
        ParityError: if the exported graphs do not compute what the model computes.
    """
    tempered = {}
    if recipe.serving.temperature:
        temperature = set_temperature(model.eval(), splits.validation, recipe.training.validation_draws, recipe.seed)
        tempered["temperature"] = asdict(temperature)
        say(f"temperature {temperature.value:.4g}")
    model = model.cpu().eval()
    fold(model)
    weights = {key: tensor.detach().clone().contiguous() for key, tensor in model.state_dict().items()}
    say("exporting")
    network = fitted_detectors(model, splits.train, recipe)
    names = DetectorNames(tuple(recipe.combined), tuple(network.density), network.two_sided)
    files = export(model, network)
    runtime = runtime_of(model, files)
    differences = parity(model, network, runtime, splits.validation)
    precision: Literal["float32", "int8"] = "float32"
    if recipe.serving.precision == "int8":
        integers = {
            "sampler.onnx": quantise_sampler(files["sampler.onnx"], model.posterior.noise_dimension),
            "network.onnx": quantise_network(files["network.onnx"]),
        }
        quantised = runtime_of(model, integers)
        error = quantisation_error(runtime, quantised, splits.validation, recipe.serving.draws)
        differences |= asdict(error)
        if error.is_hidden:
            precision, runtime = "int8", quantised
            files |= integers
        else:
            say("integers move probabilities by more than Monte Carlo does: keeping float32")

    posterior = model.posterior
    draws = min(recipe.serving.draws, posterior.max_draws or recipe.serving.draws)
    counts = draw_counts(draws)
    num_labels = max(len(data.classes), 1)
    say(f"calibrating on {len(splits.reference)} + {len(splits.ranking)} rows")
    calibration = calibrate(runtime, splits.reference, splits.ranking, counts, names, num_labels, recipe.seed)
    abstention = None if recipe.task == "regression" else abstention_spec(calibration, recipe.serving.risk, say)
    say(f"measuring on {len(splits.test)} test rows")
    measured = measure(runtime, calibration, names.density, splits.test, (data.minimum, data.maximum), recipe.seed)

    is_regression = recipe.task == "regression"
    description = Description(
        method=recipe.method,
        task=recipe.task,
        input=data.input,
        output=TargetSpec(target=recipe.data.target or "y") if is_regression else ClassSpec(classes=data.classes),
        noise=NoiseSpec(
            algorithm=posterior.algorithm,
            dimension=posterior.noise_dimension,
            theta_dimension=posterior.theta_dimension,
            paired=model.network.is_paired,
            default_draws=draws,
            max_draws=posterior.max_draws,
        ),
        detectors=DetectorSpec(
            density=names.density,
            two_sided=names.two_sided,
            combined=names.combined,
            draw_counts=tuple(counts),
            reference_rows=len(splits.reference),
            ranking_rows=len(splits.ranking),
            smallest_fpr=calibration.smallest_fpr,
            rows_per_draw_set=rows_per_draw_set(runtime, min(len(splits.reference), len(splits.ranking)), counts[-1]),
        ),
        abstention=abstention,
        training={**facts, **tempered, "data_digest": data.digest(), "python": platform.python_version()},
        quality=measured,
        parity=differences,
        precision=precision,
    )
    files["weights.safetensors"] = save_tensors(weights)
    files["calibration.safetensors"] = save_arrays(calibration.tensors())
    return description, files


def abstention_spec(calibration: Calibration, risk: float | None, say: Callable[[str], None]) -> AbstentionSpec:
    """Return what the manifest says of rows left undecided; `risk` is the level of requests that name none."""
    draws, fpr = int(calibration.draw_counts[-1]), calibration.default_fpr
    smallest = calibration.rank_tables(draws).smallest_risk(fpr)
    if risk is not None and risk < smallest:
        say(f"serving.risk {risk:g} cannot be certified, only {smallest:g}: every row will be left undecided")
    return AbstentionSpec(confidence=CONFIDENCE, smallest_risk=smallest, risk=risk)


def fitted_detectors(model: BayesianModel, train: Rows, recipe: Recipe) -> ServedNetwork:
    """Return a model's network beside its recipe's detectors, fitted on training rows, the same for the same recipe.

    A density that the flag does not combine is left out: it would take its time of every request.
    """
    labels = None if recipe.task == "regression" else torch.from_numpy(train.y)
    densities = [name for name in recipe.combined if name in DENSITY_NAMES]
    seed = hash_key(recipe.seed, Stream.DETECTORS)
    return served_network(model, torch.from_numpy(train.x), seed, labels, densities)


def fold(model: BayesianModel) -> None:
    """Normalise all weight-normed directions for good; the model computes the same."""
    model.network.fold()
    for module in model.modules():
        if isinstance(module, WeightNormLinear):
            module.fold()


def measure(
    runtime: Runtime,
    calibration: Calibration,
    density: tuple[str, ...],
    test: Rows,
    extent: tuple[float, float],
    seed: int,
) -> dict[str, float]:
    """Return measured quality, all of it as served in requests of `MEASURED_ROWS` rows (or as many
    as must share a draw set) at the default draws.

    Accuracy or error, and likelihood, of the test rows; how often the flag fires on them at fpr .05; and how often it
    fires on uniform noise in the data's range, `extent`, the plainest input that is unlike the data.
    """
    counts = calibration.draw_counts.tolist()[-1:]
    share = max(MEASURED_ROWS, rows_per_draw_set(runtime, len(test), counts[-1]))
    y = test.y
    test_scores, density_scores, likelihoods = scores_and_likelihoods(
        runtime, test, counts[0], hash_key(seed, ServedRows.TEST), share
    )
    noise_rows = generator(seed, ServedRows.NOISE_VALUES).uniform(
        *extent, (min(len(test), NOISE_ROWS), test.x.shape[1])
    )
    noise = Rows(noise_rows.astype(np.float32), y[:NOISE_ROWS])
    (noise_scores,), noise_density = served_scores(runtime, noise, counts, hash_key(seed, ServedRows.NOISE), share)
    flagged = {}
    for key, scored, dense in (
        ("flag_rate_at_05", test_scores, density_scores),
        ("uniform_noise_flagged_at_05", noise_scores, noise_density),
    ):
        p_values = calibration.p_values(detector_scores(scored, dense, density), labels_of(scored), counts[0])
        flagged[key] = float(np.mean(p_values.p_value <= 0.05))
    if isinstance(test_scores, Scores):
        measured = quality(test_scores, y)
    else:
        intervals = calibration.rank_tables(counts[0]).intervals(test_scores.mean, test_scores.std, 0.95)
        measured = regression_quality(test_scores, likelihoods, intervals, y)
    return {**{f"test_{k}": v for k, v in measured.items()}, **flagged}


def device_named(name: str) -> torch.device:
    """Return a torch device; `auto` is CUDA where there is one.

    Raises:
        InvalidInput: if CUDA is asked for and there is none.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise InvalidInput("--device", "a device that torch finds here", "cuda")
    return torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)
