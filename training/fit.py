"""Fit recipes to data."""

import math
import shutil
from dataclasses import dataclass, replace
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float32, Float64, Num

from model_store.conformal.mondrian import UNKNOWN
from model_store.errors import InvalidInput, refuse_unreadable
from model_store.scores.regression import MixtureScores
from model_store.scores.tasks import AnyScores
from model_store.scores.transforms import Transform
from training import log
from training import recipe as recipes
from training.bayes.network import BayesianModel
from training.bayes.posterior import noise
from training.calibration.temperature import set_temperature
from training.data.rows import Dataset, Rows, Splits, class_weights, split, split_sizes
from training.data.targets import fit_transform, kinds_for, mean_log_slope, transform_splits
from training.fitting.encoding import ENCODED, Encoding, encoder_graph, make_encoding
from training.fitting.laplace import check_trained
from training.fitting.linear import choose_share, fit_linear
from training.fitting.run import CHECKPOINT, Callback, Run, run_provenance
from training.fitting.steps import VALIDATION_DRAWS, check_augmentation, restoring_torch
from training.fitting.stopping import AS_CONFIGURED, AT_LIMIT, FixedEpochs
from training.fitting.warm_start import check_compatible
from training.folders import data_root, hold, runs_folder
from training.methods import BatchEnsembleMethod
from training.model import with_knots
from training.networks.architectures import source_digest
from training.publishing.publish import publish
from training.recipe import Recipe
from training.scoring import score
from training.seeds import Stream
from training.versions import Parent, Provenance, TemperatureChoice, TransformChoice, load_for

LogLikelihoods = Float64[np.ndarray, "N"]
Inputs = Num[np.ndarray, "N I"]

__all__ = ["Fitted", "fit", "publish"]

LARGEST_PIXEL = 255
SHORT_FIT = 0.2  # share of the epochs for choosing a target transform
SHORT_FITS = "target-"  # prefix of their folders
REFIT = "refit"  # folder of the second fit


@dataclass(frozen=True, eq=False)
class Fitted:
    """A fitted model with its data and provenance.

    Training and validation rows of `splits` are encoded and have transformed targets. Other rows
    are raw.
    """

    model: BayesianModel
    recipe: Recipe
    data: Dataset
    splits: Splits
    provenance: Provenance
    transform: Transform | None = None  # of regression targets
    encoding: Encoding | None = None
    folder: Path | None = None  # of the run, with a checkpoint until publication

    def outputs(self, x: Inputs, draws: int | None = None) -> Float32[np.ndarray, "K N C"]:
        if self.encoding is not None:
            x = self.encoding.encoder(x.astype(np.float32))
        return predict(self.model, x, draws or self.recipe.serving.draws, self.recipe.seed)

    def log_likelihood(self, rows: Rows) -> LogLikelihoods:
        """Compute log mean_k p(y | x, theta_k) of raw rows, in nats and the target's units."""
        return self.score(rows)[1]

    def score(self, rows: Rows) -> tuple[AnyScores, LogLikelihoods]:
        return score(self.outputs(rows.x), rows.y, self.recipe.task, self.transform)

    def discard_checkpoint(self) -> None:
        if self.folder is not None:
            for folder in (self.folder, self.folder / REFIT):
                (folder / CHECKPOINT).unlink(missing_ok=True)
            (self.folder / ENCODED).unlink(missing_ok=True)
            for path in self.folder.glob(f"{SHORT_FITS}*"):
                shutil.rmtree(path)


def fit(
    recipe: Recipe | str | Path,
    data: Dataset | None = None,
    *,
    start: Parent | None = None,
    extra: Rows | None = None,
    device: str | torch.device = "auto",
    runs: Path | None = None,
    quiet: bool = False,
    callback: Callback | None = None,
) -> Fitted:
    """Fit a recipe to data.

    After an interruption, the same call resumes from the last checkpoint and ends with the same
    weights as an uninterrupted fit.

        from pathlib import Path
        from model_store.artifacts.store import ModelStore
        from training.fit import fit, publish

        fitted = fit("recipes/digits.toml")
        fitted.log_likelihood(fitted.data.test).mean()
        publish(fitted, ModelStore(Path("models")))

    Args:
        recipe: a recipe, or the path of its file.
        data: the data, by default those of the recipe's `[data]` section.
        start: a published version to start from (`training.versions`).
        extra: additional training rows, such as new labels. Validation, calibration and test rows
            stay the same.
        device: `auto`, `cpu` or `cuda`; `auto` uses CUDA if it is available.
        runs: the folder of checkpoints, metrics and plots, by default DUBITO_RUNS or `runs`.
        quiet: disable progress bars.
        callback: called with the metrics of each epoch (docs/training.md), except in the short fits
            that choose a target transform. A refit continues the epoch count and sets `refit` to 1.
            After a resume, only the remaining epochs are reported.

    Raises:
        InvalidInput: if the recipe or the data are invalid or do not match `start`, or if another
            process is working on the same fit.
        Diverged: if the loss becomes infinite or NaN.
    """
    if not isinstance(recipe, Recipe):
        recipe = recipes.load(Path(recipe))
    data = load_for(recipe, data_root(), start) if data is None else data
    runs = runs_folder() if runs is None else runs
    splits = split(data, split_sizes(recipe))
    if extra is not None:
        splits = replace(splits, train=join(splits.train, extra))
    check_augmentation(recipe.augmentation, data.shape)
    check_pixels(recipe, data)
    graph = encoder_graph(recipe, data)
    recipe = with_knots(recipe, data, splits.train, start)
    if start is not None:
        recipe = start.complete(recipe)
        check_compatible(recipe, data, start)
    check_trained(recipe, start)
    device = find_device(device)
    folder = run_folder(runs, recipe, data, device, start, extra, graph)
    with hold(folder), restoring_torch(device):
        encoding = None
        if graph is not None:
            encoding = make_encoding(graph, data, splits.train, folder, start)
            splits = encoding.encode(splits, quiet)
        steps = _FitSteps(recipe, data, splits, device, start, encoding, folder, quiet, callback)
        return steps.fit()


@dataclass(frozen=True, eq=False)
class _FitSteps:
    recipe: Recipe
    data: Dataset
    splits: Splits  # with targets in their original units
    device: torch.device
    start: Parent | None
    encoding: Encoding | None
    folder: Path
    quiet: bool
    callback: Callback | None

    def fit(self) -> Fitted:
        recipe = self.recipe
        transform, choice = self.choose_transform()
        splits = transform_splits(self.splits, transform)
        run = self.begin(splits, self.folder)
        _announce(run, self.start)
        model = run.fit(self.quiet, self.callback)
        if run.progress.history:
            run.plot()
        if self.has_linear_model:
            fit_linear(model, splits.train)
            share = choose_share(model, splits.validation)
            log.info("a linear model has %.0f %% of the draws", 100.0 * share)
        facts: dict[str, Any] = {"target_transform": choice}
        facts["temperature"] = temper(model, recipe, splits.validation)
        slope = mean_log_slope(transform, self.splits.validation.y)
        provenance = run_provenance(run, splits, slope)
        log.info("stopped %s%s", provenance.stopped, advise(run.stopped()))
        if recipe.training.early_stopping == "refit":
            model, changes = self.refit(run, splits)
            facts |= changes
        for diagnostics in (provenance.convergence, provenance.laplace):
            if diagnostics is not None:
                log.info("%s", diagnostics["summary"])
        facts = {name: fact for name, fact in facts.items() if fact is not None}
        provenance = provenance.model_copy(update=facts)
        rest = transform, self.encoding, self.folder
        return Fitted(model, recipe, self.data, splits, provenance, *rest)

    def begin(self, splits: Splits, folder: Path, recipe: Recipe | None = None) -> Run:
        section = self.recipe.data
        weights = None
        if section.class_weights is not None:
            weights = class_weights(section.class_weights, self.data.classes, splits.train.y)
        encoded = None if self.encoding is None else self.encoding.spec.outputs
        takes_ids = self.data.takes_ids and encoded is None
        return Run(
            recipe or self.recipe,
            splits,
            self.data.shape,
            len(self.data.classes),
            folder,
            self.device,
            self.start,
            weights,
            encoded,
            int(self.data.maximum) if takes_ids else None,
        )

    @property
    def has_linear_model(self) -> bool:
        is_table = bool(self.data.columns) and self.encoding is None
        return is_table and isinstance(self.recipe.posterior, BatchEnsembleMethod)

    def refit(self, run: Run, splits: Splits) -> tuple[BayesianModel, dict[str, Any]]:
        """Refit on training and validation rows, up to the first fit's best epoch.

        Returns the model and the changes to its provenance.
        """
        settings, epochs = self.recipe.training, run.progress.best_epoch
        changes = {"early_stopping": False, "epochs": epochs, "choose": "last"}
        changes["final_learning_rate"] = self.recipe.learning_rate
        recipe = self.recipe.model_copy(update={"training": settings.model_copy(update=changes)})
        rows = join(splits.train, splits.validation)
        folder = self.folder / REFIT
        folder.mkdir(exist_ok=True)
        log.info("fitting again on training and validation rows, for %s epochs", epochs)
        second = self.begin(replace(splits, train=rows), folder, recipe)
        first_epochs = len(run.progress.history)

        def report(metrics: dict[str, float | int]) -> None:
            if self.callback is not None:
                self.callback({**metrics, "epoch": first_epochs + metrics["epoch"], "refit": 1})

        model = second.fit(self.quiet, report)
        if self.has_linear_model:
            fit_linear(model, rows)
            model.posterior.linear_draws = run.model.posterior.linear_draws
        model.likelihood.temperature.copy_(run.model.likelihood.temperature)
        facts = {
            "stopped": f"{run.stopped()}; fitted again for {epochs} epochs, including these rows",
            "steps": run.steps + second.steps,
            "seconds": round(run.progress.seconds + second.progress.seconds, 1),
        }
        return model, facts

    def choose_transform(self) -> tuple[Transform | None, TransformChoice | None]:
        """Choose the target transform by the parent, the recipe or short trial fits.

        The best transform has the highest log-likelihood of validation rows in the target's units.
        Transforms whose RMSE is more than twice the RMSE of a constant are excluded, because the
        mean of a wide log-normal can be huge.
        """
        kind = self.recipe.data.target_transform
        if self.recipe.task != "regression":
            return None, None
        if self.start is not None:
            return self.start.manifest.transform, None
        if kind != "auto":
            return fit_transform(kind, self.splits, self.data), None
        transforms = {
            name: fit_transform(name, self.splits, self.data) for name in kinds_for(self.data)
        }
        log.info("comparing target transforms (%s) by short fits", ", ".join(transforms))
        likelihoods, errors = {}, {}
        for name, transform in transforms.items():
            trial = self.folder / f"{SHORT_FITS}{name}"
            likelihoods[name], errors[name] = self._held_out(transform, trial)
        y = self.splits.validation.y.astype(np.float64)
        max_error = 2.0 * float(np.sqrt(np.square(y - self.splits.train.y.mean()).mean()))
        names = [name for name in transforms if name == "none" or errors[name] <= max_error]
        choice = best_transform({name: likelihoods[name] for name in names})
        means = {name: round(float(values.mean()), 4) for name, values in likelihoods.items()}
        message = "target transform: %s (held-out log-likelihood in the target's units: %s)"
        log.info(message, choice, ", ".join(f"{name} {mean:.4g}" for name, mean in means.items()))
        return transforms[choice], TransformChoice(chosen=choice, log_likelihood=means, rmse=errors)

    def _held_out(self, transform: Transform | None, folder: Path) -> tuple[LogLikelihoods, float]:
        folder.mkdir(parents=True, exist_ok=True)
        settings = self.recipe.training
        key = "max_epochs" if settings.epochs is None else "epochs"
        epochs = max(1, math.ceil(SHORT_FIT * getattr(settings, key)))
        changes = {key: epochs, "early_stopping": bool(settings.early_stopping)}
        short = self.recipe.model_copy(update={"training": settings.model_copy(update=changes)})
        x, y = self.splits.validation.x, self.splits.validation.y
        model = self.begin(transform_splits(self.splits, transform), folder, short).fit(quiet=True)
        outputs = predict(model, x, VALIDATION_DRAWS, self.recipe.seed)
        scores, log_likelihood = score(outputs, y, "regression", transform)
        assert isinstance(scores, MixtureScores)
        error = float(np.sqrt(np.square(scores.in_units.mean - y.astype(np.float64)).mean()))
        return log_likelihood, error


@torch.no_grad()
def predict(model: BayesianModel, x: Inputs, draws: int, seed: int) -> Float32[np.ndarray, "K N C"]:
    device = next(model.parameters()).device
    eps = noise(model.posterior, draws, seed, Stream.VALIDATION_NOISE)
    rows = torch.from_numpy(np.ascontiguousarray(x)).to(device)
    return model.eval().predict(rows, eps.to(device)).cpu().numpy()


def best_transform(likelihoods: dict[str, LogLikelihoods]) -> str:
    names = iter(likelihoods)
    best = next(names)
    for name in names:
        gain = likelihoods[name] - likelihoods[best]
        if gain.mean() > gain.std() / math.sqrt(len(gain)):
            best = name
    return best


def advise(reason: str) -> str:
    """Advise whether to train longer, based on why the fit ended."""
    if AT_LIMIT in reason:
        return "; to train longer, raise the limit in the recipe"
    return "" if reason.endswith(AS_CONFIGURED) else "; longer training would not help"


def temper(model: BayesianModel, recipe: Recipe, validation: Rows) -> TemperatureChoice | None:
    if not recipe.serving.temperature:
        return None
    temperature = set_temperature(model.eval(), validation, recipe.serving.draws, recipe.seed)
    if temperature.value != 1.0:
        log.info("probabilities tempered by %.4g, fitted on validation rows", temperature.value)
    return temperature


def join(rows: Rows, extra: Rows) -> Rows:
    """Append rows, keeping the uint8 type if possible."""
    fit_bytes = ((extra.x >= 0) & (extra.x <= 255) & (extra.x % 1 == 0)).all()
    dtype = np.uint8 if rows.x.dtype == np.uint8 and fit_bytes else np.float32
    ids = groups = weights = None
    if rows.weights is not None:
        mean = np.full(len(extra), rows.weights.mean())
        extra_weights = mean if extra.weights is None else extra.weights
        weights = np.concatenate([rows.weights, extra_weights])
    if rows.ids is not None and extra.ids is not None:
        ids = np.concatenate([rows.ids.astype(str), extra.ids])
    if rows.groups is not None:
        groups = np.concatenate([rows.groups, np.full(len(extra), UNKNOWN)])
    x = np.concatenate([rows.x.astype(dtype), extra.x.astype(dtype)])
    y = np.concatenate([rows.y, extra.y.astype(rows.y.dtype)])
    return Rows(x, y, ids, groups, weights)


def run_folder(
    runs: Path,
    recipe: Recipe,
    data: Dataset,
    device: torch.device,
    start: Parent | None = None,
    extra: Rows | None = None,
    encoder: bytes | None = None,
) -> Path:
    parts = [recipe.digest(), data.digest(), device.type]
    if start is not None:
        parts += [start.label, sha256(start.weights).hexdigest()]
    if recipe.network.weights is not None:
        parts.append(weights_digest(Path(recipe.network.weights)))
    if encoder is not None:
        parts.append(sha256(encoder).hexdigest())
    if recipe.network.factory is not None:
        parts.append(source_digest(recipe.network.factory))
    if extra is not None:
        parts += [sha256(np.ascontiguousarray(a).data).hexdigest() for a in (extra.x, extra.y)]
    return runs / f"{recipe.name}-{sha256(' '.join(parts).encode()).hexdigest()[:12]}"


def weights_digest(path: Path) -> str:
    expected = f"a safetensors file at {path}"
    with refuse_unreadable("network.weights", expected), path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()


def find_device(name: str | torch.device) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InvalidInput("--device", "cpu, since torch finds no CUDA device", "cuda")
    return device


def check_pixels(recipe: Recipe, data: Dataset) -> None:
    """Check that pixel statistics are set if a trained network receives pixels.

    They are optional for untrained networks.
    """
    network = recipe.network
    has_pixel_range = data.image is not None and data.maximum == LARGEST_PIXEL
    are_pixels = has_pixel_range or data.train.x.dtype == np.uint8
    if network.pixels is not None and not are_pixels:
        expected = "no pixel statistics, since rows are not pixels"
        raise InvalidInput("network.standardise", expected, "some")
    needs_statistics = are_pixels and network.is_trained and not recipe.data.takes_ids
    if needs_statistics and network.standardise is None:
        expected = (
            "the network's pixel statistics: { mean = [0], std = [1] } if it was trained on pixels "
            "from 0 to 1, or false for 0 to 255"
        )
        raise InvalidInput("network.standardise", expected, "none")


def _announce(run: Run, start: Parent | None) -> None:
    steps = f"{run.steps} steps"
    if not isinstance(run.stopping, FixedEpochs):
        steps = f"up to {run.recipe.training.max_epochs * run.epoch_steps} steps"
    if run.resumed:
        steps = f"resuming from step {run.progress.step}"
    message = "fitting %s: %d training rows, %s on %s; run folder %s"
    log.info(message, run.recipe.name, run.rows, steps, run.device.type, run.folder)
    if run.resumed:
        return
    if start is not None:
        log.info("warm start from %s", start.label)
    elif run.recipe.network.is_trained:
        log.info("trained network before the first step: %s", run.initial_quality())
