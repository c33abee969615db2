"""Races: whether they find the rows that all draws of all rows find, and in what share of draws and
time.

`python -m benchmarks.race NAME [--rows 4000] [--seeds 100] [--k 10] [--race 0.05] [--write]` ranks
the model's own test rows by BALD under 100 draws of each seed, with a race and without, in turns,
in parts as the service does. Rows beyond these are mixtures of two of them, made whenever they are
needed: a million rows take no memory. Times are of scores alone; ratios of a seed count.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from jaxtyping import Float32, Int64
from matplotlib.figure import Figure

from benchmarks.common import open_model, parser_of, report, spread, unseen_rows
from model_store.acquisition.ranking import LOST, Lap, race, race_stages
from model_store.acquisition.scoring import pool_scores, race_scores
from model_store.inference.model import Model
from service.engine.batching import part_rows

DRAWS = 100
ACQUISITION = "bald"
BLOCK = 1000  # rows whose mixtures are drawn at once


def main() -> None:
    parser = parser_of(__doc__, "race-NAME.md and race-NAME.png")
    parser.add_argument("--rows", type=int, default=4000)
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--k", type=int, default=10)
    parser.add_argument("--race", type=float, default=0.05)
    options = parser.parse_args()
    model = open_model(options)
    pool = RacedRows(unseen_rows(model).x[: options.rows], options.rows)
    found = np.array(
        [measure(model, pool, seed, options.k, options.race) for seed in range(options.seeds)]
    )
    report(options, f"race-{options.name}", page(options, pool, found), lambda: plot(found))


@dataclass(frozen=True, eq=False)
class RacedRows:
    """A model's unseen rows, and mixtures of two of them up to a number of rows: half of these have
    less than a sixteenth of the second row, and none more than a half."""

    unseen: Float32[np.ndarray, "M I"]
    number: int

    def parts(
        self, places: Int64[np.ndarray, "n"], most: int
    ) -> Iterator[Float32[np.ndarray, "m I"]]:
        """Yield the rows at these places, which ascend, in parts of at most `most` rows."""
        blocks = np.flatnonzero(np.diff(places // BLOCK)) + 1
        for of_block in np.split(places, blocks):
            for first in range(0, len(of_block), most):
                yield self._rows(of_block[first : first + most])

    def _rows(self, places: Int64[np.ndarray, "m"]) -> Float32[np.ndarray, "m I"]:
        block = int(places[0]) // BLOCK
        rng, here = np.random.default_rng(block), places - block * BLOCK
        one, other = rng.integers(0, len(self.unseen), (2, BLOCK))
        share = 0.5 * rng.random((BLOCK, 1), dtype=np.float32) ** 3
        is_unseen = places < len(self.unseen)
        share[here[is_unseen]], one[here[is_unseen]] = 0.0, places[is_unseen]
        return (1.0 - share[here]) * self.unseen[one[here]] + share[here] * self.unseen[other[here]]


def measure(model: Model, pool: RacedRows, seed: int, k: int, probability: float) -> list[float]:
    """Return whether a race found the k rows that all draws find, its share of draws, of time, and
    of finalists."""
    full, _, whole_s = scored(model, pool, seed, Lap(np.arange(pool.number), DRAWS), False)
    stages = race_stages(probability, ACQUISITION, model.manifest.task, DRAWS)
    laps = race(pool.number, k, stages, DRAWS, probability)
    lap, draws, race_s = next(laps), 0, 0.0
    while True:
        draws += len(lap.rows) * lap.num_draws
        found, errors, lap_s = scored(model, pool, seed, lap, True)
        race_s += lap_s
        try:
            lap = laps.send((found, errors))
        except StopIteration as ended:
            scores, finalists = ended.value
            break
    known = scores > LOST
    assert np.array_equal(scores[known], full[known])
    is_same = set(np.argsort(-full, kind="stable")[:k]) == set(
        np.argsort(-scores, kind="stable")[:k]
    )
    return [is_same, draws / (pool.number * DRAWS), race_s / whole_s, finalists / pool.number]


def scored(
    model: Model, pool: RacedRows, seed: int, lap: Lap, is_race: bool
) -> tuple[np.ndarray, np.ndarray, float]:
    """Return scores of rows, of a race their standard errors, and the seconds that it took."""
    draws, most = model.runtime.draw_set(seed, lap.num_draws), part_rows(model, lap.num_draws)
    first, seconds = 0, 0.0
    score: Callable[..., Any] = race_scores if is_race else pool_scores
    found = np.zeros((2, len(lap.rows)))
    for x in pool.parts(lap.rows, most):
        begun = time.perf_counter()
        found[: 2 if is_race else 1, first : first + len(x)] = score(model, x, draws, ACQUISITION)
        seconds += time.perf_counter() - begun
        first += len(x)
    return found[0], found[1], seconds


def page(options: argparse.Namespace, pool: RacedRows, found: np.ndarray) -> str:
    same, *shares = found.T
    is_mixed = pool.number > len(pool.unseen)
    mixed = f", of which {len(pool.unseen):,} as they are and the others mixed" if is_mixed else ""
    draws, seconds, finalists = (spread(share.tolist(), 3) for share in shares)
    return "\n".join(
        [
            f"# Races on {options.name}'s unseen rows",
            "",
            f"`python -m benchmarks.race {options.name} --rows {pool.number} --seeds {len(found)} "
            f"--k {options.k} --race {options.race:g} --write`: {pool.number:,} rows{mixed}, "
            f"{DRAWS} draws, {ACQUISITION}; median over seeds (least - most).",
            "",
            "| same rows as all draws find | share of the draws | share of the time | rows that "
            "took all draws |",
            "|---|---|---|---|",
            f"| {int(same.sum())} of {len(same)} seeds | {draws} | {seconds} | {finalists} |",
            "",
            f"![share of draws and time by seed](race-{options.name}.png)",
            "",
        ]
    )


def plot(found: np.ndarray) -> Figure:
    figure, axis = plt.subplots(figsize=(6, 3.2), layout="constrained")
    bins = np.linspace(0, max(0.5, found[:, 1:3].max()), 51)
    axis.hist(found[:, 1], bins, alpha=0.7, label="draws")
    axis.hist(found[:, 2], bins, alpha=0.7, label="time")
    axis.axvline(0.25, color="black", linewidth=0.8, linestyle="--", label="a quarter")
    axis.set(xlabel="share of what all draws of all rows take", ylabel="seeds")
    axis.legend(fontsize="small")
    return figure


if __name__ == "__main__":
    main()
