"""BatchBALD beside `batchbald_redux`, the authors' package, in one run on the same draws.

`.venv-audit/bin/python -m benchmarks.batchbald [--write]` chooses 10 of 10,000 rows of 10 classes
under 100 draws, from pools whose draws disagree little or much; both count at most 10,000
configurations of labels, and sample as many beyond. Rows are Gaussian, of random size; draws are
softmax layers with Gaussian weights. No probability is below 1e-5, as batchbald_redux says NaN of
products that are 0 in float32. Of 10 classes both are exact for the first five rows; of the pool of
two classes for all ten, and there both compute in float64.

* time: all from the draws' log probabilities to the ten rows; a thread each;
* same: how many of the rows that both choose exactly are the same ones, in the same order.
"""

import contextlib
import io
import time
from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from jaxtyping import Float32
from threadpoolctl import threadpool_limits

from benchmarks.options import RESULTS, parser_of
from model_store.scores.joint import MOST_CONFIGURATIONS, BatchBald, greedy

COLUMNS = 64
K = 10
DRAWS = 100
# probability: of smaller ones the product over rows is 0 in float32, and batchbald_redux says NaN
LEAST = 1e-5


@dataclass(frozen=True)
class Pool:
    """What rows and draws are made of, and how many rows both choose exactly."""

    name: str
    rows: int
    classes: int
    spread: float  # standard deviation of weights over draws
    exact: int


POOLS = (
    Pool("2 classes, all exact", 2_000, 2, 0.15, 10),
    Pool("draws disagree little", 10_000, 10, 0.02, 5),
    Pool("draws disagree", 10_000, 10, 0.05, 5),
    Pool("draws disagree much", 10_000, 10, 0.15, 5),
)


@dataclass(frozen=True)
class Result:
    """What one pool gave."""

    pool: Pool
    seconds: tuple[float, float]  # ours, theirs
    chosen: tuple[list[int], list[int]]
    gains: list[float]  # ours

    @property
    def same(self) -> int:
        """How many rows that both choose exactly are the same."""
        ours, theirs = (chosen[: self.pool.exact] for chosen in self.chosen)
        return next(
            (i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b),
            self.pool.exact,
        )


def log_probs_of(pool: Pool, seed: int) -> Float32[np.ndarray, "K N C"]:
    """Return the draws' log class probabilities."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(pool.rows, COLUMNS)) * rng.gamma(2.0, size=(pool.rows, 1))
    weights = 0.3 * rng.normal(size=(COLUMNS, pool.classes))
    weights = weights + pool.spread * rng.normal(size=(DRAWS, COLUMNS, pool.classes))
    logits = x @ weights
    logits -= np.logaddexp.reduce(logits, axis=2, keepdims=True)
    logits = np.maximum(logits, np.log(LEAST))
    logits -= np.logaddexp.reduce(logits, axis=2, keepdims=True)
    return logits.astype(np.float32)


def measured(pool: Pool, seed: int) -> Result:
    """Choose from one pool by both."""
    from batchbald_redux.batchbald import get_batchbald_batch  # of an environment of its own

    log_probs = log_probs_of(pool, seed)
    begun = time.perf_counter()
    candidates = BatchBald.of(np.exp(log_probs))
    rows = np.arange(pool.rows)
    ours = greedy(BatchBald(candidates, DRAWS, seed), np.ones_like(rows), rows, K)
    between = time.perf_counter()
    dtype = torch.float64 if pool.exact == K else torch.float32
    torch.manual_seed(seed)
    with contextlib.redirect_stderr(io.StringIO()):  # its bars of progress
        given = torch.from_numpy(log_probs.transpose(1, 0, 2).copy()).to(dtype)
        theirs = get_batchbald_batch(given, K, MOST_CONFIGURATIONS, dtype=dtype)
    ended = time.perf_counter()
    return Result(
        pool,
        (between - begun, ended - between),
        ([row for row, _ in ours], theirs.indices),
        [g for _, g in ours],
    )


def table(results: list[Result], seed: int) -> str:
    """Return the results as Markdown."""
    lines = [
        "# BatchBALD beside batchbald_redux",
        "",
        f"`.venv-audit/bin/python -m benchmarks.batchbald --seed {seed} --write`, after `make "
        f"audit`: {K} rows under "
        f"{DRAWS} draws, at most {MOST_CONFIGURATIONS:,} configurations of labels counted or "
        "sampled, a thread each, "
        "one after the other on a shared machine: ratios count, single times do not.",
        "",
        "| pool | rows | classes | gain of the first row, the last, all (nats) | ours, s | "
        "batchbald_redux, s | "
        "times as fast | same rows where both are exact |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for result in results:
        pool, (ours, theirs) = result.pool, result.seconds
        gains = f"{result.gains[0]:.3f}, {result.gains[-1]:.4f}, {sum(result.gains):.2f}"
        lines.append(
            f"| {pool.name} | {pool.rows:,} | {pool.classes} | {gains} | {ours:.2f} | "
            f"{theirs:.1f} | "
            f"{theirs / ours:.0f} | {result.same} of {pool.exact} |"
        )
    lines += [
        "",
        "![seconds by pool](batchbald.png)",
        "",
        f"{DRAWS} draws tell no more than log {DRAWS} = {np.log(DRAWS):.2f} nats apart: where "
        "they disagree much, "
        "five rows tell nearly all of it, and what the last rows add is next to nothing. "
        "batchbald_redux computes "
        "every row again each time; here only rows whose bound is above the best are "
        "([how](../decisions/0019-acquisition.md)).",
    ]
    return "\n".join(lines) + "\n"


def plot(results: list[Result], path: Path) -> None:
    """Draw both times of each pool."""
    plt.switch_backend("Agg")
    figure, axis = plt.subplots(figsize=(7, 3), layout="constrained")
    places = np.arange(len(results))
    for i, name in enumerate(("ours", "batchbald_redux")):
        axis.barh(
            places + 0.2 - 0.4 * i, [result.seconds[i] for result in results], 0.4, label=name
        )
    axis.set(
        xscale="log",
        xlabel="seconds",
        yticks=places,
        yticklabels=[result.pool.name for result in results],
    )
    axis.legend()
    figure.savefig(path, dpi=110)


def main() -> None:
    """Measure, print the table, and with `--write` keep it and the picture in docs/results."""
    parser = parser_of(__doc__, "batchbald.md", name=None)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = []
    with threadpool_limits(1):
        for pool in POOLS:
            results.append(measured(pool, options.seed))
            print(table(results, options.seed), flush=True)
            if options.write:
                (RESULTS / "batchbald.md").write_text(table(results, options.seed))
                plot(results, RESULTS / "batchbald.png")


if __name__ == "__main__":
    main()
