"""Whether the servers side by side predict what the model's posterior does, from fresh draws."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.peers.posterior import DRAWS, Posterior
from benchmarks.peers.servers import Contender, NotStarted, ask

CHECKED_ROWS, CHECKED_ROUNDS, REFERENCE_DRAWS = 8, 10, 4000
SIGMAS, ROUNDING = 6.0, 0.003  # what answers may differ by: Monte Carlo error, and integers


@dataclass(frozen=True)
class Reference:
    """What many draws in process say of some rows: mean probabilities (N, C) and each draw's
    deviation from them."""

    rows: list[list[int]]
    mean: np.ndarray
    std: np.ndarray


def reference_of(weights: bytes, rows: np.ndarray) -> Reference:
    """Return the reference for those rows, of a few hundred, on which draws differ most."""
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
    """Ask for the same rows again and again, all at a time, and compare the means of answers with
    the reference's.

    Raises:
        NotStarted: if answers are off by more than Monte Carlo error, or are the same again, and so
            no fresh draws.
    """
    bodies = [json.dumps(contender.peer.body(row)).encode() for row in reference.rows]

    def answer(body: bytes) -> list[float]:
        given = ask(port, contender.peer.path, body)
        if given is None:
            raise NotStarted("a request of the check was not answered")
        return contender.peer.probabilities(given)

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
