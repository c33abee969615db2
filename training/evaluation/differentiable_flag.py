"""The flag's statistic in torch, differentiable, for an attacker who knows it."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from model_store.conformal.calibration import Calibration
from model_store.conformal.detectors import FittedDetector, Tail
from training.evaluation.attacks import log_mean_probs

LEAST_GAP = 1e-30  # between reference scores that are the same
LEAST_SCORE = 1e-30


class DifferentiableFlag:
    """The combined statistic of a classifier's detectors, as
    `training.evaluation.attacks.quiet_pgd` takes it."""

    def __init__(self, calibration: Calibration, density: tuple[str, ...]) -> None:
        """Take a calibration, and the names of the density detectors in their order."""
        self.calibration = calibration
        self.density = density

    def __call__(
        self, log_probs: Float[Tensor, "K N C"], density: Float[Tensor, "N M"]
    ) -> Float[Tensor, "N"]:
        """Return the statistic of each row, from the largest calibrated number of draws that there
        are."""
        used = self.calibration.draws_used(len(log_probs))
        log_probs = log_probs[:used]
        labels = log_mean_probs(log_probs).argmax(1)
        scores = {**_scores(log_probs), **dict(zip(self.density, density.unbind(1), strict=True))}
        detectors = self.calibration.detectors(used)
        surprisals = [
            _surprisal(detectors[name], scores[name], labels) for name in self.calibration.combined
        ]
        return torch.logsumexp(torch.stack(surprisals), dim=0) - torch.log(
            torch.tensor(float(len(surprisals)))
        )


def _scores(log_probs: Tensor) -> dict[str, Tensor]:
    """Return the posterior scores, as `model_store.scores.classification` defines them."""
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
    """Return what a fitted detector says of each score: `model_store.conformal.detectors`."""
    if detector.standard is not None:
        centre, spread = (
            torch.from_numpy(v).to(score)
            for v in (detector.standard.centre, detector.standard.spread)
        )
        score = (score.clamp(min=LEAST_SCORE).log() - centre[labels]) / spread[labels]
    surprisal = detector.surprisal
    reference, tail = (
        torch.from_numpy(values).to(score) for values in (surprisal.reference, surprisal.tail)
    )
    right = torch.searchsorted(reference, score.detach().contiguous()).clamp(1, len(reference) - 1)
    gap = (reference[right] - reference[right - 1]).clamp(min=LEAST_GAP)
    share = ((score - reference[right - 1]) / gap).clamp(0.0, 1.0)
    within = tail[right - 1] + share * (tail[right] - tail[right - 1])
    beyond = _beyond(surprisal.above, (score - reference[-1]).clamp(min=0.0))
    if surprisal.below is not None:
        beyond = beyond + _beyond(surprisal.below, (reference[0] - score).clamp(min=0.0))
    return within + beyond


def _beyond(tail: Tail, excess: Tensor) -> Tensor:
    """Return the nats of each excess."""
    if math.isinf(tail.excesses):
        return excess / tail.scale
    return tail.excesses * torch.log1p(excess / (tail.excesses * tail.scale))
