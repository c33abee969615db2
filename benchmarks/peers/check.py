"""Check that servers predict the model's posterior with fresh draws."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.peers.posterior import DRAWS, Posterior
from benchmarks.peers.servers import Contender, NotStarted, ask

CHECKED_ROWS, CHECKED_ROUNDS, REFERENCE_DRAWS = 8, 10, 4000
SIGMAS, ROUNDING = 6.0, 0.003  # tolerances for the Monte Carlo error and int8


@dataclass(frozen=True)
class Reference:
    """Mean probabilities (N, C) of many draws, and the standard deviation of draws."""

    rows: list[list[int]]
    mean: np.ndarray
    std: np.ndarray


def compute_reference(weights: bytes, rows: np.ndarray) -> Reference:
    """Compute the reference for the rows with the largest variance between draws."""
    torch.manual_seed(0)
    posterior = Posterior(weights)
    x = torch.from_numpy(rows.astype(np.float32))
    doubted = (
        posterior.probabilities(x, torch.randn(100, sum(posterior.sizes)))
        .std(0)
        .mean(-1)
        .argsort(descending=True)[:CHECKED_ROWS]
    )
    eps = torch.randn(REFERENCE_DRAWS, sum(posterior.sizes))
    probabilities = posterior.probabilities(x[doubted], eps).numpy()
    return Reference(rows[doubted.numpy()].tolist(), probabilities.mean(0), probabilities.std(0))


def check(contender: Contender, port: int, reference: Reference) -> None:
    """Compare mean answers to repeated requests with the reference.

    Raises:
        NotStarted: if the difference exceeds the Monte Carlo error, or if answers repeat.
    """
    bodies = [json.dumps(contender.peer.body(row)).encode() for row in reference.rows]

    def answer(body: bytes) -> list[float]:
        options = ask(port, contender.peer.path, body)
        if options is None:
            raise NotStarted("a request of the check was not answered")
        return contender.peer.probabilities(options)

    with ThreadPoolExecutor(CHECKED_ROWS) as pool:
        answers = np.array([list(pool.map(answer, bodies)) for _ in range(CHECKED_ROUNDS)])
    error = np.sqrt(1.0 / (CHECKED_ROUNDS * DRAWS) + 1.0 / REFERENCE_DRAWS) * reference.std
    excess = np.abs(answers.mean(0) - reference.mean) - SIGMAS * error - ROUNDING
    if not (excess <= 0).all():
        raise NotStarted(
            f"answers are off by {float(excess.max()):.3f} more than Monte Carlo error explains"
        )
    if (answers.std(0).max(-1) == 0).any():
        raise NotStarted("answers repeat: draws are not fresh")
