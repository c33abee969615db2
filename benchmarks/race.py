"""Races: whether they find the rows that all draws of all rows find, and in what share of draws and
time.

`python -m benchmarks.race NAME [--rows 4000] [--seeds 100] [--k 10] [--race 0.05] [--write]` ranks
the model's own test rows by BALD under 100 draws of each seed, with a race and without, in turns,
in parts as the service does. Times are of arithmetic alone; ratios of a seed count.
"""

import argparse
import time
from collections.abc import Callable

import matplotlib.pyplot as plt
import numpy as np
from jaxtyping import Float32
from matplotlib.figure import Figure

from benchmarks.common import open_model, parser_of, report, spread, unseen_rows
from model_store.acquisition.ranking import LOST, race, race_stages
from model_store.acquisition.scoring import pool_scores, race_scores
from model_store.inference.model import Model
from service.engine.batching import part_rows

DRAWS = 100
ACQUISITION = "bald"


def main() -> None:
    parser = parser_of(__doc__, "race-NAME.md and race-NAME.png")
    parser.add_argument("--rows", type=int, default=4000)
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--k", type=int, default=10)
    parser.add_argument("--race", type=float, default=0.05)
    options = parser.parse_args()
    model = open_model(options)
    x = unseen_rows(model).x[: options.rows]
    found = np.array(
        [measure(model, x, seed, options.k, options.race) for seed in range(options.seeds)]
    )
    text = page(options, len(x), found)
    report(options, f"race-{options.name}", text, lambda: plot(found))


def measure(
    model: Model, x: Float32[np.ndarray, "N I"], seed: int, k: int, probability: float
) -> list[float]:
    """Return whether a race found the k rows that all draws find, its share of draws, of time, and
    of finalists."""
    begun = time.perf_counter()
    full = in_parts(model, x, seed, DRAWS)[0]
    between = time.perf_counter()
    stages = race_stages(probability, ACQUISITION, model.manifest.task, DRAWS)
    laps = race(len(x), k, stages, DRAWS, probability)
    lap, draws = next(laps), 0
    while True:
        draws += len(lap.rows) * lap.num_draws
        try:
            lap = laps.send(in_parts(model, x[lap.rows], seed, lap.num_draws))
        except StopIteration as ended:
            scores, finalists = ended.value
            break
    seconds = time.perf_counter() - between
    known = scores > LOST
    assert np.array_equal(scores[known], full[known])
    is_same = set(np.argsort(-full, kind="stable")[:k]) == set(
        np.argsort(-scores, kind="stable")[:k]
    )
    return [
        is_same,
        draws / (len(x) * DRAWS),
        seconds / (between - begun),
        finalists / len(x),
    ]


def in_parts(
    model: Model, x: Float32[np.ndarray, "N I"], seed: int, num_draws: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows' scores, and their standard errors unless these are all draws."""
    draws, most = model.runtime.draw_set(seed, num_draws), part_rows(model, num_draws)
    score: Callable[..., object] = pool_scores if num_draws == DRAWS else race_scores
    parts = [score(model, x[i : i + most], draws, ACQUISITION) for i in range(0, len(x), most)]
    if num_draws == DRAWS:
        return np.concatenate(parts), np.zeros(len(x))
    return np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])


def page(options: argparse.Namespace, rows: int, found: np.ndarray) -> str:
    same, *shares = found.T
    draws, seconds, finalists = (spread(share.tolist(), 3) for share in shares)
    return "\n".join(
        [
            f"# Races on {options.name}'s unseen rows",
            "",
            f"`python -m benchmarks.race {options.name} --rows {rows} --seeds {len(found)} --k "
            f"{options.k} --race {options.race:g} --write`: {rows:,} rows, {DRAWS} draws, "
            f"{ACQUISITION}; median over seeds (least - most).",
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
