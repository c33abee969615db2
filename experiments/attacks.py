"""Adversarial attacks on a published classifier, and their detection.

Shapes: K draws, N rows, I numbers in a flat row, in the units of the data. Step sizes and radii are
fractions of the data's range, maximum - minimum. Attacked rows are clipped to that range. Attackers
follow the gradient of -log mean_k p(y | x, theta_k) over their draws.

* `fgsm`: one step along the gradient's sign (Goodfellow et al., "Explaining and harnessing
  adversarial examples", 2015), for several step sizes at once.
* `towards`: many small steps that raise the probability of a target class (Kurakin et al.,
  "Adversarial examples in the physical world", 2017; Li and Gal 2017, section 5.3).
* `pgd`: steps from a random start, within a radius in the maximum norm (Madry et al., "Towards deep
  learning models resistant to adversarial attacks", 2018).
* `quiet_pgd`: PGD that evades the detectors. Steps reduce the margin of a row's label until it is
  lost, and then the flag statistic (selective projected gradient descent: Bryniarski et al.,
  "Evading adversarial example detection defenses with orthogonal projected gradient descent",
  2022).

Seeds determine the draws and the random starts.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor

from model_store.conformal.calibration import Calibration
from model_store.conformal.detectors import FittedDetector, Tail
from model_store.inference.model import Model
from model_store.inference.noise import MAX_SEED, noise, standard_normal
from model_store.scores.classification import Scores
from training.bayes.posterior import Posterior
from training.data.rows import Rows, split, split_sizes
from training.evaluation.evaluate import EvaluationOptions, test_rows
from training.evaluation.quality import (
    ServedPrediction,
    ServedPredictor,
    error_detection,
    measure_set,
)
from training.export.served import ServedNetwork, fit_detectors
from training.seeds import EvaluationStream, hash_key
from training.versions import Parent, fitted_data

STEPS = (0.05, 0.1, 0.2, 0.3, 0.5)
FGSM_DRAWS = (1, 32)
RADII = (0.1, 0.2)
ITERATIONS = 20
ITERATED_DRAWS = 4
TARGET = 0
CHUNK_ROW_DRAWS = 8192  # rows x draws in one pass
PATH_RADII = 2.5  # sum of all steps, in radii (Madry et al.)
LOST_MARGIN = 1.5  # lead of another class in nats, for a lost label
MIN_GAP = 1e-30  # avoids a division by 0
MIN_SCORE = 1e-30

Gradient = Callable[[Tensor, int], Tensor]  # from rows and the step's index
Statistic = Callable[[Float[Tensor, "K N C"], Float[Tensor, "N M"]], Float[Tensor, "N"]]

X = Float[Tensor, "N I"]
Y = Int64[Tensor, "N"]


@dataclass(frozen=True)
class AttackDraws:
    """The posterior draws that an attacker uses to compute gradients."""

    count: int
    seed: int = 0
    fresh: bool = False  # new draws for each step


@dataclass(frozen=True, eq=False)
class AttackedModel:
    """A differentiable classifier, and the range of its inputs."""

    network: ServedNetwork
    posterior: Posterior
    minimum: float
    maximum: float

    @torch.no_grad()
    def theta(self, draws: AttackDraws, step: int = 0) -> Float[Tensor, "K 1 D"]:
        """Sample theta for a step.

        Draws are reused if the posterior has a limited number of them.
        """
        max_draws = self.posterior.max_draws
        count = min(draws.count, max_draws or draws.count)
        first = count * step if draws.fresh and max_draws is None else 0
        eps = noise(
            self.posterior.algorithm, draws.seed, first, count, self.posterior.noise_dimension
        )
        return self.posterior(torch.from_numpy(eps))[:, None]

    def log_probs(self, x: X, theta: Float[Tensor, "K 1 D"]) -> Float[Tensor, "K N C"]:
        return self.network.likelihood(self.network.network(x, theta))

    def clip(self, x: Float[Tensor, "*B I"]) -> Float[Tensor, "*B I"]:
        return x.clamp(self.minimum, self.maximum)

    @property
    def span(self) -> float:
        return self.maximum - self.minimum


@dataclass(frozen=True, eq=False)
class AttackedRows:
    name: str
    x: Float32[np.ndarray, "N I"]
    index: np.ndarray  # position among the test rows


def measure_attacks(version: Parent, model: Model, root: Path, rows: int) -> dict[str, Any]:
    """Attack up to `rows` of a version's test rows.

    Returns the accuracy and detection metrics by attack.
    """
    spec, data = version.manifest.input, fitted_data(version, root)
    options = EvaluationOptions(rows=rows)
    test = test_rows(data, True, options)
    predictor = ServedPredictor(model, version.manifest.noise.default_draws, options.seed)
    predicted = predictor("test", test.x.astype(np.float32))
    fitted = version.model().eval()
    train = split(data, split_sizes(version.recipe)).train
    network = fit_detectors(fitted, train, version.recipe, spec.shape)
    attacked = AttackedModel(network, fitted.posterior, spec.minimum, spec.maximum)
    statistic = differentiable_flag(model.calibration, version.manifest.detectors.density)
    return {
        attack.name: _measure(predicted, predictor(attack.name, attack.x), test.y[attack.index])
        for attack in attacks(attacked, test, statistic, options.seed)
    }


def _measure(test: ServedPrediction, attacked: ServedPrediction, y: np.ndarray) -> dict[str, Any]:
    scores = attacked.prediction.scores
    assert isinstance(scores, Scores)
    is_wrong = scores.label != y
    is_quiet = attacked.prediction.judged_p_values.p_value > 0.05
    return {
        **measure_set(test, attacked),
        "accuracy": float((~is_wrong).mean()),
        "hits": float((is_wrong & is_quiet).mean()),
        "mean_scores": {n: float(s.mean()) for n, s in attacked.prediction.detected.items()},
        "error_detection": error_detection(attacked, is_wrong.astype(np.float64)),
    }


def attacks(
    attacked: AttackedModel, rows: Rows, statistic: Statistic, seed: int
) -> Iterator[AttackedRows]:
    x, y = torch.from_numpy(rows.x.astype(np.float32)), torch.from_numpy(rows.y)
    index = np.arange(len(rows))
    fixed_seed = hash_key(seed, EvaluationStream.FIXED_DRAWS) % (MAX_SEED + 1)
    fresh_seed = hash_key(seed, EvaluationStream.FRESH_DRAWS) % (MAX_SEED + 1)
    start_seed = hash_key(seed, EvaluationStream.STARTS) % (MAX_SEED + 1)
    for count in FGSM_DRAWS:
        results = fgsm(attacked, x, y, STEPS, AttackDraws(count, fixed_seed))
        for step, result in zip(STEPS, results, strict=True):
            yield AttackedRows(f"fgsm-{step:g}-of-{count}-draws", result.numpy(), index)
    draws = AttackDraws(ITERATED_DRAWS, fresh_seed, fresh=True)
    sources = np.flatnonzero(rows.y != TARGET)
    if len(sources):
        target = torch.full((len(sources),), TARGET)
        result = towards(attacked, x[sources], target, ITERATIONS, draws)
        yield AttackedRows("towards-first-class", result.numpy(), sources)
    for radius in RADII:
        result = pgd(attacked, x, y, radius, ITERATIONS, draws, start_seed)
        yield AttackedRows(f"pgd-{radius:g}", result.numpy(), index)
        result = quiet_pgd(attacked, x, y, radius, ITERATIONS, draws, statistic, start_seed)
        yield AttackedRows(f"quiet-pgd-{radius:g}", result.numpy(), index)


def fgsm(
    attacked: AttackedModel, x: X, y: Y, steps: Sequence[float], draws: AttackDraws
) -> Float[Tensor, "S N I"]:
    direction = _loss_gradient(attacked, y, draws)(x, 0).sign()
    return torch.stack([attacked.clip(x + step * attacked.span * direction) for step in steps])


def towards(
    attacked: AttackedModel,
    x: X,
    target: Y,
    iterations: int,
    draws: AttackDraws,
    step: float = 0.01,
) -> X:
    gradient = _loss_gradient(attacked, target, draws)
    return _climb(x, iterations, -step * attacked.span, attacked.clip, gradient)


def pgd(
    attacked: AttackedModel,
    x: X,
    y: Y,
    radius: float,
    iterations: int,
    draws: AttackDraws,
    start_seed: int = 0,
) -> X:
    """Maximise the loss within `radius` of x in the maximum norm."""
    ball = _Ball(attacked, x, radius * attacked.span)
    gradient = _loss_gradient(attacked, y, draws)
    return _climb(ball.start(start_seed), iterations, ball.step(iterations), ball.project, gradient)


def quiet_pgd(
    attacked: AttackedModel,
    x: X,
    y: Y,
    radius: float,
    iterations: int,
    draws: AttackDraws,
    statistic: Statistic,
    start_seed: int = 0,
) -> X:
    """Attack rows within `radius` so that they are misclassified but not flagged.

    Return the point of each row's path with the lowest statistic among points with a lost label, or
    the last point if the label was never lost.

    Args:
        statistic: the flag's differentiable statistic, from log class probabilities and density
            scores. It is higher for rows more unlike the data.
    """
    ball = _Ball(attacked, x, radius * attacked.span)
    best = ball.start(start_seed)
    lowest = torch.full((len(x),), torch.inf)  # statistic of the best points with a lost label

    def gradient(x: Tensor, i: int) -> Tensor:
        nonlocal best, lowest
        theta = attacked.theta(draws, i)
        parts = [
            _margin_and_statistic(attacked, rows, labels, theta, statistic)
            for rows, labels in zip(_chunks(x, theta), _chunks(y, theta), strict=True)
        ]
        margin, quiet, to_label, to_quiet = (torch.cat(part) for part in zip(*parts, strict=True))
        is_lost = margin <= -LOST_MARGIN
        is_better = (is_lost & (quiet < lowest)) | (torch.isinf(lowest) & ~is_lost)
        best = torch.where(is_better[:, None], x, best)
        lowest = torch.where(is_lost, torch.minimum(lowest, quiet), lowest)
        return torch.where(is_lost[:, None], to_quiet, to_label)

    # `gradient` compares the point before each step, so the last point needs one more step.
    _climb(best, iterations + 1, -ball.step(iterations), ball.project, gradient)
    return best


@dataclass(frozen=True, eq=False)
class _Ball:
    attacked: AttackedModel
    centre: Tensor
    radius: float  # in the data's units

    def start(self, seed: int) -> Tensor:
        """Draw a uniform starting point in each row's ball.

        It depends only on the seed and the row.
        """
        normal = torch.from_numpy(standard_normal(seed, 0, *self.centre.shape))
        return self.project(self.centre + self.radius * (2.0 * torch.special.ndtr(normal) - 1.0))

    def step(self, iterations: int) -> float:
        return PATH_RADII * self.radius / iterations

    def project(self, x: Tensor) -> Tensor:
        near = torch.maximum(x, self.centre - self.radius)
        return self.attacked.clip(torch.minimum(near, self.centre + self.radius))


def _climb(
    x: Tensor, steps: int, size: float, project: Callable[[Tensor], Tensor], gradient: Gradient
) -> Tensor:
    for i in range(steps):
        x = project(x + size * gradient(x, i).sign())
    return x


def _loss_gradient(attacked: AttackedModel, y: Tensor, draws: AttackDraws) -> Gradient:
    def gradient(x: Tensor, i: int) -> Tensor:
        theta, parts = attacked.theta(draws, i), []
        for chunk, labels in zip(_chunks(x, theta), _chunks(y, theta), strict=True):
            rows = chunk.detach().requires_grad_()
            log_probs = log_mean_probs(attacked.log_probs(rows, theta))
            loss = -log_probs.gather(1, labels[:, None]).sum()
            parts.append(torch.autograd.grad(loss, rows)[0])
        return torch.cat(parts)

    return gradient


def _margin_and_statistic(
    attacked: AttackedModel, x: Tensor, y: Tensor, theta: Tensor, statistic: Statistic
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x = x.detach().requires_grad_()
    outputs, density = attacked.network(x, theta)
    log_probs = log_mean_probs(outputs)
    true = log_probs.gather(1, y[:, None])[:, 0]
    margin = true - log_probs.scatter(1, y[:, None], -torch.inf).max(1).values
    quiet = statistic(outputs, density)
    (to_label,) = torch.autograd.grad(margin.sum(), x, retain_graph=True)
    (to_quiet,) = torch.autograd.grad(quiet.sum(), x)
    return margin.detach(), quiet.detach(), to_label, to_quiet


def _chunks(values: Tensor, theta: Tensor) -> tuple[Tensor, ...]:
    return values.split(max(1, CHUNK_ROW_DRAWS // len(theta)))


def log_mean_probs(log_probs: Float[Tensor, "K N C"]) -> Float[Tensor, "N C"]:
    return torch.logsumexp(log_probs, dim=0) - math.log(len(log_probs))


def differentiable_flag(calibration: Calibration, density_names: Sequence[str]) -> Statistic:
    """Build a differentiable version of the flag's combined statistic.

    It uses the largest calibrated draw count. `density_names` are in the order of their columns.
    """

    def statistic(
        log_probs: Float[Tensor, "K N C"], density: Float[Tensor, "N M"]
    ) -> Float[Tensor, "N"]:
        used = calibration.calibrated_draws(len(log_probs))
        log_probs = log_probs[:used]
        labels = log_mean_probs(log_probs).argmax(1)
        scores = _scores(log_probs) | dict(zip(density_names, density.unbind(1), strict=True))
        detectors = calibration.detectors[used]
        surprisals = torch.stack(
            [
                _surprisal(detectors[name], scores[name], labels)
                for name in calibration.names.combined
            ]
        )
        return torch.logsumexp(surprisals, dim=0) - torch.log(torch.tensor(float(len(surprisals))))

    return statistic


def _scores(log_probs: Tensor) -> dict[str, Tensor]:
    """Compute scores in torch, as in `model_store.scores.classification`."""
    probs, log_mean = log_probs.exp(), log_mean_probs(log_probs)
    mean = probs.mean(0)
    entropy = -(mean * log_mean).sum(1)
    variance = (probs - mean).square().mean(0)
    return {
        "entropy": entropy,
        "bald": entropy + (probs * log_probs).sum(2).mean(0),
        "mean_std": variance.clamp(min=1e-20).sqrt().mean(1),
        "variation_ratio": 1.0 - mean.max(1).values,
    }


def _surprisal(detector: FittedDetector, score: Tensor, labels: Tensor) -> Tensor:
    """Compute surprisals in torch, as in `model_store.conformal.detectors`."""
    if detector.standard is not None:
        centre = torch.from_numpy(detector.standard.centre).to(score)[labels]
        spread = torch.from_numpy(detector.standard.spread).to(score)[labels]
        score = (score.clamp(min=MIN_SCORE).log() - centre) / spread
    surprisal = detector.surprisal
    reference = torch.from_numpy(surprisal.reference).to(score)
    tail = torch.from_numpy(surprisal.surprisals).to(score)
    right = torch.searchsorted(reference, score.detach().contiguous()).clamp(1, len(reference) - 1)
    gap = (reference[right] - reference[right - 1]).clamp(min=MIN_GAP)
    share = ((score - reference[right - 1]) / gap).clamp(0.0, 1.0)
    within = tail[right - 1] + share * (tail[right] - tail[right - 1])
    outside = _tail_surprisal(surprisal.upper_tail, (score - reference[-1]).clamp(min=0.0))
    if surprisal.lower_tail is not None:
        below = (reference[0] - score).clamp(min=0.0)
        outside = outside + _tail_surprisal(surprisal.lower_tail, below)
    return within + outside


def _tail_surprisal(tail: Tail, excess: Tensor) -> Tensor:
    return tail.excesses * torch.log1p(excess / (tail.excesses * tail.scale))
