"""Fit a recipe to data, and publish what was fitted: `publish(fit(recipe, data), store)`."""

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
from model_store.errors import InvalidInput
from model_store.scores.regression import MixtureScores
from model_store.scores.tasks import AnyScores
from model_store.scores.transforms import Transform
from training import log
from training import recipe as recipes
from training.bayes.network import BayesianModel
from training.bayes.posterior import noise
from training.calibration.temperature import set_temperature
from training.data import Dataset, Rows, Splits, split, split_sizes
from training.data.rows import class_weights
from training.data.targets import fit_transform, kinds_for, log_slope_of, transform_splits
from training.fitting.encoding import ENCODED, Encoding, encoder_graph, make_encoding
from training.fitting.laplace import check_trained
from training.fitting.run import CHECKPOINT, Callback, Run, run_provenance
from training.fitting.steps import (
    VALIDATION_DRAWS,
    check_augmentation,
    keep_freed_memory,
    restoring_torch,
)
from training.fitting.stopping import FixedEpochs
from training.fitting.warm_start import check_compatible
from training.folders import data_root, hold, runs_folder
from training.model import with_knots
from training.provenance import Provenance, TemperatureChoice, TransformChoice
from training.publishing.publish import publish
from training.recipe import Recipe
from training.scoring import score
from training.seeds import Stream
from training.versions import Parent, load_for

__all__ = ["Fitted", "fit", "publish"]

LARGEST_PIXEL = 255
SHORT_FIT = 0.2  # of a fit's epochs, to choose a target's transform by
SHORT_FITS = "target-"  # folders of these
REFIT = "refit"  # folder of a second fit


@dataclass(frozen=True, eq=False)
class Fitted:
    """A fitted model, and all that its publication needs.

    Training and validation rows of `splits` are as the model takes them, encoded and their targets
    transformed; the other rows are raw.
    """

    model: BayesianModel
    recipe: Recipe
    data: Dataset
    splits: Splits
    provenance: Provenance
    transform: Transform | None = None  # of a regression's targets
    encoding: Encoding | None = None
    folder: Path | None = None  # of its run, with the checkpoint until it is published

    @torch.no_grad()
    def outputs(
        self, x: Num[np.ndarray, "N I"], draws: int | None = None
    ) -> Float32[np.ndarray, "K N C"]:
        model = self.model.eval()
        device = next(model.parameters()).device
        if self.encoding is not None:
            x = self.encoding.encoder(x.astype(np.float32))
        draws = draws or self.recipe.serving.draws
        eps = noise(model.posterior, draws, self.recipe.seed, Stream.VALIDATION_NOISE)
        rows = torch.from_numpy(np.ascontiguousarray(x)).to(device)
        return model.predict(rows, eps.to(device)).cpu().numpy()

    def log_likelihood(self, rows: Rows) -> Float64[np.ndarray, "N"]:
        """Return log mean_k p(y | x, theta_k) of raw rows, in nats, in the target's own units."""
        return self.score(rows)[1]

    def score(self, rows: Rows) -> tuple[AnyScores, Float64[np.ndarray, "N"]]:
        """Return the scores of raw rows, and their log-likelihoods."""
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

    A fit that was stopped goes on from its last checkpoint when it is called again, and ends with
    the weights that it would have had.

        from pathlib import Path
        from model_store.artifacts.store import ModelStore
        from training.fit import fit, publish

        fitted = fit("recipes/digits.toml")
        fitted.log_likelihood(fitted.data.test).mean()
        publish(fitted, ModelStore(Path("models")))

    Args:
        recipe: what to fit, or the path of its file.
        data: by default what the recipe's `[data]` names.
        start: a published version whose weights the fit begins at (`training.versions`).
        extra: further training rows, such as labels that have come since. Validation, calibration
            and test rows stay what they are.
        device: `auto`, `cpu` or `cuda`; `auto` is CUDA where there is one.
        runs: the folder of checkpoints, metrics and plots, by default DUBITO_RUNS or `runs`.
        quiet: no progress bars.
        callback: called after each epoch with its metrics (docs/training.md), but for the short
            fits that choose a target's transform. In a second fit epochs count on, and `refit` is
            1. A fit that goes on begins where it was.

    Raises:
        InvalidInput: naming what is wrong with the recipe or the data, or what of `start` does not
            fit them; or if another process works on the same fit.
        Diverged: if training leaves the range of finite numbers.
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
    recipe = with_knots(recipe, data, splits.train.x, start)
    if start is not None:
        check_compatible(recipe, data, start)
    check_trained(recipe, start)
    device = find_device(device)
    keep_freed_memory()
    folder = run_folder(runs, recipe, data, device, start, extra, graph)
    with hold(folder), restoring_torch(device):
        encoding = None
        if graph is not None:
            encoding = make_encoding(graph, recipe, data, splits.train, folder, start)
            splits = encoding.encode(splits, quiet)
        fits = _Fits(recipe, data, splits, device, start, encoding)
        transform, choice = fits.choose_transform(folder)
        slope = log_slope_of(transform, splits.validation.y)
        splits = transform_splits(splits, transform)
        run = fits.begin(splits, folder)
        _announce(run, start)
        model = run.fit(quiet, callback)
        temperature = temper(model, recipe, splits.validation)
        provenance = run_provenance(run, splits, slope)
        log.info("stopped %s", provenance.stopped)
        if recipe.training.refit:
            model, more = fits.refit(run, splits, folder, quiet, callback)
            provenance = provenance.model_copy(update=more)
    for found in (provenance.convergence, provenance.laplace):
        if found is not None:
            log.info("%s", found["says"])
    more = {"target_transform": choice, "temperature": temperature}
    provenance = provenance.model_copy(update={k: v for k, v in more.items() if v is not None})
    return Fitted(model, recipe, data, splits, provenance, transform, encoding, folder)


@dataclass(frozen=True, eq=False)
class _Fits:
    recipe: Recipe
    data: Dataset
    splits: Splits  # their targets in their own units
    device: torch.device
    start: Parent | None
    encoding: Encoding | None

    def begin(self, splits: Splits, folder: Path, recipe: Recipe | None = None) -> Run:
        wanted = self.recipe.data.class_weights
        weights = None
        if wanted is not None:
            weights = class_weights(wanted, self.data.classes, splits.train.y)
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

    def refit(
        self, run: Run, splits: Splits, folder: Path, quiet: bool, callback: Callback | None
    ) -> tuple[BayesianModel, dict[str, Any]]:
        """Return a model that was fitted as a run's best one was, but to validation rows as well,
        and what its provenance then says."""
        settings, epochs = self.recipe.training, run.progress.best_epoch
        same = {"early_stopping": False, "refit": False, "epochs": epochs, "choose": "last"}
        same["final_learning_rate"] = settings.learning_rate
        recipe = self.recipe.model_copy(update={"training": settings.model_copy(update=same)})
        rows = join(splits.train, splits.validation)
        folder = folder / REFIT
        folder.mkdir(exist_ok=True)
        log.info("fitting again, for %s epochs, with validation rows among the others", epochs)
        again = self.begin(replace(splits, train=rows), folder, recipe)
        done = len(run.progress.history)

        def tell(metrics: dict[str, float | int]) -> None:
            if callback is not None:
                callback({**metrics, "epoch": done + metrics["epoch"], "refit": 1})

        model = again.fit(quiet, tell)
        model.likelihood.temperature.copy_(run.model.likelihood.temperature)
        more = {
            "stopped": f"{run.stopped()}; fitted again for {epochs}, with them among the others",
            "steps": run.steps + again.steps,
            "seconds": round(run.progress.seconds + again.progress.seconds, 1),
        }
        return model, more

    def choose_transform(self, folder: Path) -> tuple[Transform | None, TransformChoice | None]:
        """Return the transform of the targets: the parent's, the recipe's, or the best of short
        fits.

        The best is that of the highest log-likelihood of validation rows, of a density in the
        target's own units (with log g'(y), or a transform that shrinks the target would always
        win), among those whose means miss these rows by at most twice as much as the training
        rows' mean does: of a logarithm with a wide spread, means are astronomical.
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
        said = "trying the target as it is and transformed (%s), a short fit each"
        log.info(said, ", ".join(transforms))
        found = {
            name: self._held_out(transform, folder / f"{SHORT_FITS}{name}")
            for name, transform in transforms.items()
        }
        y = self.splits.validation.y.astype(np.float64)
        guess = float(np.sqrt(np.square(y - self.splits.train.y.mean()).mean()))
        wild = [name for name, (_, error) in found.items() if name != "none" and error > 2 * guess]
        chosen = best_transform(
            {name: values for name, (values, _) in found.items() if name not in wild}
        )
        means = {name: round(float(values.mean()), 4) for name, (values, _) in found.items()}
        errors = {name: error for name, (_, error) in found.items()}
        said = "target transform: %s (held-out log-likelihood in the target's units: %s)"
        log.info(said, chosen, ", ".join(f"{name} {mean:.4g}" for name, mean in means.items()))
        for name in wild:
            said = (
                "the transform %s is out: its means miss held-out rows by %.4g, a constant by %.4g"
            )
            log.info(said, name, errors[name], guess)
        return transforms[chosen], TransformChoice(chosen=chosen, log_likelihood=means, rmse=errors)

    def _held_out(
        self, transform: Transform | None, folder: Path
    ) -> tuple[Float64[np.ndarray, "N"], float]:
        """Return the log-likelihoods of validation rows by a short fit, and its error (RMSE)."""
        folder.mkdir(parents=True, exist_ok=True)
        settings = self.recipe.training
        key = "max_epochs" if settings.epochs is None else "epochs"
        epochs = max(1, math.ceil(SHORT_FIT * getattr(settings, key)))
        shorter = settings.model_copy(update={key: epochs, "refit": False})
        short = self.recipe.model_copy(update={"training": shorter})
        run = self.begin(transform_splits(self.splits, transform), folder, short)
        model = run.fit(quiet=True).eval()
        eps = noise(model.posterior, VALIDATION_DRAWS, self.recipe.seed, Stream.VALIDATION_NOISE)
        served = model.predict(run.validation[0], eps.to(self.device)).cpu().numpy()
        y = self.splits.validation.y
        scores, log_likelihood = score(served, y, "regression", transform)
        assert isinstance(scores, MixtureScores)
        error = float(np.sqrt(np.square(scores.in_units.mean - y.astype(np.float64)).mean()))
        return log_likelihood, error


def best_transform(likelihoods: dict[str, Float64[np.ndarray, "N"]]) -> str:
    """Return the name of the best; a later one must be better than those before it by more than
    the standard error of the mean difference."""
    names = iter(likelihoods)
    chosen = next(names)
    for name in names:
        gain = likelihoods[name] - likelihoods[chosen]
        if gain.mean() > gain.std() / math.sqrt(len(gain)):
            chosen = name
    return chosen


def temper(model: BayesianModel, recipe: Recipe, validation: Rows) -> TemperatureChoice | None:
    if not recipe.serving.temperature:
        return None
    temperature = set_temperature(model.eval(), validation, VALIDATION_DRAWS, recipe.seed)
    log.info("temperature %.4g", temperature.value)
    return temperature


def join(rows: Rows, more: Rows) -> Rows:
    """Return rows with others behind them; bytes stay bytes where the others are such."""
    are_bytes = ((more.x >= 0) & (more.x <= 255) & (more.x % 1 == 0)).all()
    as_bytes = rows.x.dtype == np.uint8 and are_bytes
    kind = np.uint8 if as_bytes else np.float32
    ids = groups = None
    if rows.ids is not None and more.ids is not None:
        ids = np.concatenate([rows.ids.astype(str), more.ids])
    if rows.groups is not None:
        groups = np.concatenate([rows.groups, np.full(len(more), UNKNOWN)])
    x = np.concatenate([rows.x.astype(kind), more.x.astype(kind)])
    return Rows(x, np.concatenate([rows.y, more.y.astype(rows.y.dtype)]), ids, groups)


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
    if extra is not None:
        parts += [sha256(np.ascontiguousarray(of).data).hexdigest() for of in (extra.x, extra.y)]
    return runs / f"{recipe.name}-{sha256(' '.join(parts).encode()).hexdigest()[:12]}"


def weights_digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file_digest(file, "sha256").hexdigest()
    except OSError as error:
        expected = f"a safetensors file at {path}"
        raise InvalidInput("network.weights", expected, error.strerror or "an error") from None


def find_device(name: str | torch.device) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InvalidInput("--device", "a device that torch finds here", "cuda")
    return device


def check_pixels(recipe: Recipe, data: Dataset) -> None:
    """Check that what a network is told of pixels fits the data, and that one trained on pixels is
    told it."""
    network = recipe.network
    are_pixels = data.train.x.dtype == np.uint8 or (
        data.image is not None and data.maximum == LARGEST_PIXEL
    )
    if network.pixel_mean is not None:
        if not are_pixels:
            raise InvalidInput("network.pixel_mean", "none for rows that are no pixels", "some")
    elif are_pixels and network.is_trained and network.standardise is None:
        expected = (
            "what the network was trained on: [0] with pixel_std = [1] for pixels from 0 to 1, "
            "or network.standardise = false for 0 to 255"
        )
        raise InvalidInput("network.pixel_mean", expected, "nothing")


def _announce(run: Run, start: Parent | None) -> None:
    begun = f"{run.steps} steps"
    if not isinstance(run.stopping, FixedEpochs):
        begun = f"{run.recipe.training.max_epochs * run.epoch_steps} steps at most"
    if run.resumed:
        begun = f"going on from step {run.progress.step}"
    said = "%s: %d training rows, %s on %s; run in %s"
    log.info(said, run.recipe.name, run.rows, begun, run.device.type, run.folder)
    if run.resumed:
        return
    if start is not None:
        log.info("warm start from %s", start.label)
    elif run.recipe.network.is_trained:
        log.info("the trained network, before the first step: %s", run.at_start())
