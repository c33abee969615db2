"""The training loop, with checkpoints, metrics and a plot.

Random numbers depend only on the recipe's seed and the step or epoch. A checkpoint contains all
other state, so an interrupted run ends with the same weights as an uninterrupted one.
"""

import copy
import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from model_store.artifacts.disk import replace_file
from model_store.errors import DubitoError, InvalidInput
from training.bayes.diagnostics import guess_nll, mean_log_std
from training.bayes.likelihoods import Categorical, Gaussian
from training.bayes.network import CHUNK_ROWS, BayesianModel
from training.bayes.posterior import noise
from training.calibration.temperature import max_rows_for
from training.data.rows import Rows, Splits
from training.export.graphs import CHECKED_ROWS, check_exports
from training.fitting.checkpoint import read_checkpoint, write_checkpoint
from training.fitting.convergence import convergence
from training.fitting.laplace import fit_laplace
from training.fitting.plots import plot_run
from training.fitting.steps import VALIDATION_DRAWS, KLSchedule, Steps, adam, decay_rates
from training.fitting.stopping import (
    EarlyStopping,
    Metrics,
    Progress,
    add_wrong_row,
    is_as_good,
    stopping_rule,
)
from training.fitting.warm_start import copy_weights, start_from_network
from training.methods import Laplace
from training.model import build, initialise
from training.progress import Bar
from training.recipe import Recipe
from training.seeds import Stream, hash_key
from training.versions import Parent, Provenance

CHECKPOINT = "checkpoint.safetensors"
INITIALISATION_ROWS = 1000
MAX_UNCERTAINTY_ROWS = 500  # validation rows for the convergence report
WRITE_INTERVAL_S = 1  # minimum between two writes of metrics.jsonl
FIRST_CHECKPOINT_S, CHECKPOINT_INTERVAL_S = 2.0, 20.0

Callback = Callable[[Metrics], object]  # called with the metrics of each epoch


class Diverged(DubitoError):
    """Raised when the training loss becomes infinite or NaN."""


class Run:
    """A training run for a recipe, which keeps its files in a folder.

    The files are `checkpoint.safetensors`, `metrics.jsonl` and `progress.png`.
    """

    def __init__(
        self,
        recipe: Recipe,
        splits: Splits,
        shape: Sequence[int],
        num_classes: int,
        folder: Path,
        device: torch.device,
        parent: Parent | None = None,
        class_weights: Float64[np.ndarray, "C"] | None = None,
        encoded: int | None = None,
        largest_id: int | None = None,
    ) -> None:
        """Start a run, or resume it if the folder has a checkpoint.

        `shape` is the shape of a raw row, and `encoded` the length of a row from the encoder, if
        there is one. `num_classes` is 0 for regression. `largest_id` is the largest id in the data,
        if rows consist of ids.
        """
        self.recipe = recipe
        self.parent = parent
        self.folder = folder
        self.checkpoint = folder / CHECKPOINT
        self.device = device
        self.train = _tensors(splits.train, device)
        self.validation = _tensors(splits.validation, device)
        self.rows = len(splits.train)
        self.weights = splits.train.weights
        self.batch_rows = min(recipe.training.batch_rows, self.rows)
        self.epoch_steps = self.rows // self.batch_rows
        is_continued = parent is not None and parent.recipe.method == recipe.method
        self.kl = KLSchedule.from_recipe(recipe, self.rows, self.epoch_steps, is_continued)
        self.stopping = stopping_rule(recipe, parent, self.epoch_steps, self.kl.ramp_epochs)
        order = _order(self.rows, recipe.seed, Stream.INITIAL_ROWS)[:INITIALISATION_ROWS]
        rows = self.train[0][order.to(device)]
        weights = None if parent is None or is_continued else parent.network_weights()
        model = build(recipe, shape, num_classes, rows.cpu(), encoded, weights, largest_id)
        self.model = model.to(device)
        self.spread_seed = hash_key(recipe.seed, Stream.VALIDATION_NOISE)
        self.laplace: dict[str, Any] | None = None  # facts for the manifest, after its fit
        self.optimizer = adam(self.model, recipe)
        self.sums = torch.zeros(3, dtype=torch.float64, device=device)  # NLL, KL, metric
        # The loss of each step of the epoch, at the full KL weight.
        self.losses = torch.zeros(self.epoch_steps, dtype=torch.float64, device=device)
        self.best: dict[str, Tensor] = {}
        # The scores of the best epoch, per validation row or step; a scalar for early stopping.
        self.lowest: Tensor | None = None
        self.uncertainty: list[Tensor] = []  # for each epoch, of validation rows
        self.progress = Progress(0, -1, [], 0.0)
        self.written = 0.0
        self.resumed = self.checkpoint.exists()
        if self.resumed:
            self._restore()
        else:
            self._begin(rows.float(), class_weights)
        self._take_step = Steps(self.model, recipe, shape, self.optimizer, self.batch_rows).take

    def _begin(self, rows: Tensor, class_weights: Float64[np.ndarray, "C"] | None) -> None:
        recipe, parent, likelihood = self.recipe, self.parent, self.model.likelihood
        if parent is None:
            initialise(self.model, rows, recipe.is_standardised)
            likelihood.start(self.train[1])
        elif parent.recipe.method != recipe.method:
            start_from_network(self.model, parent.model().to(self.device), rows)
        else:
            copy_weights(self.model, parent.model().to(self.device))
        if class_weights is not None:
            assert isinstance(likelihood, Categorical)
            assert likelihood.log_weights is not None
            likelihood.log_weights.copy_(torch.from_numpy(np.log(class_weights)))
        if recipe.network.factory is not None:
            examples = None if recipe.is_standardised else rows[:CHECKED_ROWS].cpu()
            check_exports(self.model, examples)

    @torch.no_grad()
    def initial_quality(self) -> str:
        """Describe a trained network's validation scores before the first step.

        Poor scores suggest that the rows differ from the data that the network was trained on.
        """
        likelihood, (x, y) = self.model.likelihood, self.validation
        _, log_likelihood, errors, *_ = likelihood.validation(self._predict_centre(x), y).unbind(1)
        metric, mean = likelihood.to_metric(errors.mean().item()), log_likelihood.mean().item()
        message = f"validation {likelihood.metric} {metric:.4g}, log-likelihood {mean:.4g}"
        guess = -guess_nll(self.train[1])
        if mean > guess:
            return message
        advice = "these rows may differ from its training data"
        return f"{message}: no better than a guess ({guess:.4g}); {advice}"

    @torch.no_grad()
    def _predict_centre(self, x: Tensor) -> Tensor:
        centre = self.model.posterior.centre().to(self.device)[None, None]
        self.model.eval()
        predictions = self.model.serve(x, centre, CHUNK_ROWS)
        self.model.train()
        return predictions

    @property
    def epochs(self) -> int:
        return self.stopping.epochs(self.progress)

    @property
    def steps(self) -> int:
        return self.epochs * self.epoch_steps

    def stopped(self) -> str:
        return self.stopping.reason(self.progress)

    def fit(self, quiet: bool = False, callback: Callback | None = None) -> BayesianModel:
        start_s = time.monotonic()
        due_s = start_s + min(FIRST_CHECKPOINT_S, CHECKPOINT_INTERVAL_S)  # next checkpoint
        previous_s = self.progress.seconds
        bar = Bar(self.steps, "step", quiet, initial=self.progress.step)
        order = None
        metric = self.model.likelihood.metric
        with bar:
            while self.progress.step < self.steps:
                epoch, i = divmod(self.progress.step, self.epoch_steps)
                if order is None or i == 0:
                    seed, weights = self.recipe.seed, self.weights
                    order = _order(self.rows, seed, Stream.ORDER, epoch, weights=weights)
                    order = order.to(self.device)
                self._step(order[i * self.batch_rows : (i + 1) * self.batch_rows])
                self.progress.step += 1
                self.progress.seconds = previous_s + time.monotonic() - start_s
                bar.update()
                if i + 1 == self.epoch_steps:
                    metrics = self._end_epoch(epoch)
                    if callback is not None:
                        callback({**metrics})
                    self.stopping.update(self.progress)
                    bar.total = self.steps
                    bar.report(
                        f"epoch {epoch + 1}/{self.epochs} loss {metrics['loss']:.4f} "
                        f"KL {metrics['kl']:.0f} {metric} {metrics[f'validation_{metric}']:.4g}"
                    )
                if time.monotonic() > due_s or self.progress.step == self.steps:
                    self._save()
                    due_s = time.monotonic() + CHECKPOINT_INTERVAL_S
        if self.steps == 0:
            self._save()
        else:
            self.model.load_state_dict(self.best)
        if isinstance(self.recipe.posterior, Laplace):
            self._fit_laplace(self.recipe.posterior)
        return self.model

    def plot(self) -> None:
        plot_run(self.progress.history, self.folder / "progress.png", self.recipe.name)

    def _fit_laplace(self, section: Laplace) -> None:
        likelihood, (x, y) = self.model.likelihood, self.train
        # The noise of a trained network is not part of its weights.
        if isinstance(likelihood, Gaussian) and self.steps == 0 and self.parent is None:
            likelihood.fit_noise(self._predict_centre(x)[0], y)
        times = 1.0 / (self.rows * self.kl.full)
        seed, draws = self.recipe.seed, VALIDATION_DRAWS
        self.laplace = fit_laplace(
            self.model, section, self.train, self.validation, seed, draws, times
        )

    def _step(self, index: Tensor) -> None:
        step = self.progress.step
        decay_rates(self.optimizer, self.stopping.decay(self.progress, self.epoch_steps))
        x, y = self.train[0][index], self.train[1][index]
        result = self._take_step(x, y, self.kl.weight(step), step)
        nll, kl, _ = result.float()
        self.losses[step % self.epoch_steps] = nll + self.kl.full * kl
        self.sums += result

    def _end_epoch(self, epoch: int) -> Metrics:
        nll, kl, error = (self.sums / self.epoch_steps).tolist()
        self.sums.zero_()
        if not math.isfinite(nll + kl):
            raise Diverged(
                f"training diverged in epoch {epoch + 1}: lower training.learning_rate "
                f"(delete {self.checkpoint} to start the fit again)"
            )
        likelihood = self.model.likelihood
        scores, log_likelihood, errors, *wrong, uncertainty = self._validate().unbind(1)
        self.uncertainty.append(uncertainty[:MAX_UNCERTAINTY_ROWS].float().cpu())
        stopping = add_wrong_row(log_likelihood, *wrong) if wrong else log_likelihood.mean()
        metrics = {
            "epoch": epoch + 1,
            "loss": nll + kl / self.rows,
            "nll": nll,
            "kl": kl,
            "objective": self.losses.mean().item(),
            f"train_{likelihood.metric}": likelihood.to_metric(error),
            "validation_log_likelihood": log_likelihood.mean().item(),
            f"validation_{likelihood.score}": scores.mean().item(),
            f"validation_{likelihood.metric}": likelihood.to_metric(errors.mean().item()),
            "learning_rate": float(self.optimizer.param_groups[0]["lr"]),
            "seconds": self.progress.seconds,
        }
        if isinstance(self.stopping, EarlyStopping):
            metrics["stopping_log_likelihood"] = stopping.item()
        log_std = mean_log_std(self.model, self.spread_seed)
        if log_std is not None:
            metrics["log_std"] = log_std
        history = self.progress.history
        history.append(metrics)
        if self._is_best(epoch, scores, stopping):
            self.best = copy.deepcopy(self.model.state_dict())
            self.progress.best_epoch = epoch + 1
        is_last = epoch + 1 == self.epochs
        if is_last or time.monotonic() - self.written > WRITE_INTERVAL_S:
            lines = "".join(json.dumps(m) + "\n" for m in history)
            replace_file(self.folder / "metrics.jsonl", lines.encode())
            self.written = time.monotonic()
        return metrics

    def _validate(self) -> Float64[Tensor, "N S"]:
        likelihood = self.model.likelihood
        # All draws are equal before the Laplace approximation.
        is_fixed = isinstance(self.recipe.posterior, Laplace) and self.laplace is None
        draws = 1 if is_fixed else VALIDATION_DRAWS
        key = (self.recipe.seed, Stream.VALIDATION_NOISE)
        eps = noise(self.model.posterior, draws, *key, device=self.device)
        self.model.eval()
        rows = max_rows_for(likelihood, len(eps))
        batches = zip(*(tensor.split(rows) for tensor in self.validation), strict=True)
        parts = [likelihood.validation(self.model.predict(x, eps), y) for x, y in batches]
        self.model.train()
        return torch.cat(parts)

    def validation_log_likelihood(self) -> float:
        """Compute the best model's mean validation log-likelihood, in nats."""
        if self.laplace is None:
            return self.progress.history[self.progress.best_epoch - 1]["validation_log_likelihood"]
        return self._validate()[:, 1].mean().item()

    def _is_best(self, epoch: int, validation_scores: Tensor, stopping: Tensor) -> bool:
        if self.recipe.choose == "last":
            return True
        if isinstance(self.stopping, EarlyStopping):
            if self.lowest is not None and not -stopping < self.lowest:
                return False
            self.lowest = -stopping
            return True
        if epoch < self.kl.ramp_epochs:
            return epoch + 1 == self.epochs
        by_validation = self.recipe.choose == "likelihood"
        scores = validation_scores if by_validation else self.losses.clone()
        lowest = self.lowest
        if lowest is None or scores.mean() < lowest.mean():
            self.lowest = scores
        return lowest is None or is_as_good(scores, lowest, paired=by_validation)

    def _save(self) -> None:
        content = {
            "model": self.model.state_dict(),
            "best": self.best,
            "optimizer": self.optimizer.state_dict(),
            "sums": self.sums,
            "losses": self.losses,
            "lowest": self.lowest,
            "uncertainty": self.uncertainty,
            "progress": vars(self.progress),
        }
        write_checkpoint(self.checkpoint, content)

    def _restore(self) -> None:
        content = read_checkpoint(self.checkpoint, self.device)
        try:
            self.model.load_state_dict(content["model"])
            self.optimizer.load_state_dict(content["optimizer"])
            self.sums.copy_(content["sums"])
            self.losses.copy_(content["losses"])
            self.best, self.lowest = content["best"], content["lowest"]
            self.uncertainty = [rows.cpu() for rows in content["uncertainty"]]
            self.progress = Progress(**content["progress"])
        except (RuntimeError, ValueError, KeyError, TypeError):
            expected = "a checkpoint of this run (delete it to start the fit again)"
            raise InvalidInput(str(self.checkpoint), expected, "one of another run") from None


def run_provenance(run: Run, splits: Splits, log_slope: float = 0.0) -> Provenance:
    """Return the provenance of a finished run.

    For transformed targets g(y), `log_slope` is the mean of log g'(y) over validation rows, which
    converts the log-likelihood of g(y) to that of y.
    """
    facts: dict[str, Any] = {} if run.parent is None else {"warm_start": run.parent.provenance}
    if run.laplace is not None:
        facts["laplace"] = run.laplace
    if run.recipe.posterior.is_variational:
        best_epoch = run.progress.best_epoch
        facts["convergence"] = convergence(
            run.model,
            run.train,
            torch.stack(run.uncertainty[:best_epoch]),
            [metrics["learning_rate"] for metrics in run.progress.history[:best_epoch]],
            run.kl.full,
            run.spread_seed,
            run.recipe.has_bound,
        )
    return Provenance(
        recipe=run.recipe.model_dump(mode="json"),
        rows={name: len(rows) for name, rows in vars(splits).items()},
        epochs=run.epochs,
        stopped=run.stopped(),
        choose=run.recipe.choose,
        best_epoch=run.progress.best_epoch,
        steps=run.steps,
        seconds=round(run.progress.seconds, 1),
        parameters=sum(p.numel() for p in run.model.parameters()),
        torch=torch.__version__,
        device=run.device.type,
        validation_log_likelihood=run.validation_log_likelihood() + log_slope,
        **facts,
    )


def _tensors(rows: Rows, device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(rows.x).to(device), torch.from_numpy(rows.y).to(device)


def _order(
    rows: int, *key: int, weights: Float64[np.ndarray, "N"] | None = None
) -> Int64[Tensor, "N"]:
    """Shuffle the rows of an epoch.

    With weights, a systematic sample contains each row in proportion to its weight on average.
    """
    generator = torch.Generator().manual_seed(hash_key(*key))
    order = torch.randperm(rows, generator=generator)
    if weights is None:
        return order
    ends = torch.from_numpy(weights)[order].cumsum(0)
    start = torch.rand(1, generator=generator, dtype=torch.float64)
    places = (torch.arange(rows) + start) * (ends[-1] / rows)
    sample = order[torch.searchsorted(ends, places, right=True).clamp(max=rows - 1)]
    return sample[torch.randperm(rows, generator=generator)]
