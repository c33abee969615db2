"""The pool: which rows get labels first, which ones an acquisition looks at, and which of these it
takes."""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float32, Float64, Int64

from model_store.acquisition.choice import (
    RANDOM,
    Lap,
    Raced,
    Scored,
    copies_of,
    joint_ranking,
    power_ranking,
    race,
    race_stages,
    ranking,
)
from model_store.errors import InvalidInput
from model_store.scores.tasks import AnyScores, Predictive
from model_store.types import Task
from training.seeds import ActiveStream, generator

SCORED_AT_ONCE = 1000  # rows
Index = Int64[np.ndarray, "_"]
Predict = Callable[[Index, slice], Float32[np.ndarray, "_ _ _"]]  # what some draws say of some rows


@dataclass(frozen=True)
class Wanted:
    """What chooses rows: an acquisition of a task; where it is raced, how often it may go wrong;
    where it is sampled, the power of the weights.
    """

    acquisition: str
    task: Task
    race: float | None = None
    beta: float = 1.0


def initial_labels(y: np.ndarray, classes: int, count: int, seed: int) -> Index:
    """Return the rows that get the first labels: of each class as many as of any other, of a
    regression random ones.

    Raises:
        InvalidInput: if they are too many, or too few to have one of each class, or targets that
            differ.
    """
    if not 1 <= count <= len(y):
        raise InvalidInput(
            "--initial", f"from 1 to {len(y)}, as many as there are training rows", str(count)
        )
    order = generator(seed, ActiveStream.INITIAL_LABELS).permutation(len(y))
    if not classes:
        if np.ptp(y[order[:count]]) == 0:
            raise InvalidInput(
                "--initial", "so many labels that not all are the same", f"{count} that are"
            )
        return order[:count]
    if count < classes:
        raise InvalidInput("--initial", f"at least {classes}, one label of each class", str(count))
    place = np.empty(len(y), dtype=np.int64)  # of each row among those of its class
    for c in range(classes):
        of_class = order[y[order] == c]
        place[of_class] = np.arange(len(of_class))
    return order[np.argsort(place[order], kind="stable")][:count]


def candidates(labelled: Index, rows: int, count: int, seed: int, number: int) -> Index:
    """Return random rows without a label, as many as an acquisition looks at or as there are."""
    unlabelled = np.setdiff1d(np.arange(rows), labelled)
    order = generator(seed, ActiveStream.CANDIDATES, number).permutation(rows)
    kept = order[np.isin(order, unlabelled)][:count]
    return np.sort(kept)


def chosen(
    predict: Predict,
    draws: int,
    x: Float32[np.ndarray, "N I"],
    ids: Sequence[str],
    wanted: Wanted,
    predictive: Predictive,
    seed: int,
    k: int,
) -> Index:
    """Return which k of some rows an acquisition takes, best first.

    Args:
        predict: gives what draws say of rows.
        draws: as many as there are.
        x: the rows.
        ids: what they are called: ties are decided by these and the seed.
        wanted: the acquisition, and whether it is a race.
        predictive: of the task.
        seed: of what is random in the choice.
        k: how many to take.
    """
    name = wanted.acquisition
    if name == RANDOM:
        return _indices(ranking(None, ids, seed, k))
    if name in predictive.joint_scores:
        copies, score = copies_of(x), predictive.joint_scores[name]
        samples = predictive.samples(predict(copies.first, slice(0, draws)))
        joint = score(score.of(samples), draws, seed)
        return _indices(joint_ranking(joint, np.arange(len(copies.first)), copies, ids, k))
    stages = race_stages(
        wanted.race if name in predictive.raced else None, name, wanted.task, draws
    )
    if stages:
        assert wanted.race is not None
        scores = _raced(
            predict, race(len(x), k, stages, draws, wanted.race), draws, predictive, name
        )
        return _indices(ranking(scores, ids, seed, k))
    outputs, jackknifed = predict(np.arange(len(x)), slice(0, draws)), name in predictive.jackknifed
    scores = np.concatenate(
        [
            predictive.acquisition(_scores(part, predictive, jackknifed), name)
            for part in _parts(outputs)
        ]
    )
    if name in predictive.sampled:
        return _indices(power_ranking(scores, copies_of(x), ids, seed, k, wanted.beta))
    return _indices(ranking(scores, ids, seed, k))


def _raced(
    predict: Predict,
    laps: Generator[Lap, Scored, Raced],
    draws: int,
    predictive: Predictive,
    name: str,
) -> Float64[np.ndarray, "_"]:
    """Return the scores of rows that were raced, of those left out as the race says."""
    lap = next(laps)
    while True:
        outputs = predict(lap.rows, slice(0, lap.num_draws))
        parts = [predictive.race(_scores(part, predictive, True), name) for part in _parts(outputs)]
        scores, errors = (np.concatenate(of) for of in zip(*parts, strict=True))
        try:
            lap = laps.send((scores, None if lap.num_draws == draws else errors))
        except StopIteration as ended:
            raced: Raced = ended.value
            return raced.scores


def _parts(outputs: Float32[np.ndarray, "K N C"]) -> list[Float32[np.ndarray, "K n C"]]:
    return np.array_split(outputs, -(-outputs.shape[1] // SCORED_AT_ONCE), axis=1)


def _scores(
    outputs: Float32[np.ndarray, "K N C"], predictive: Predictive, with_errors: bool
) -> AnyScores:
    return predictive.scores(predictive.sums(outputs), with_errors)


def _indices(ranked: list[dict[str, Any]]) -> Index:
    return np.array([row["index"] for row in ranked], dtype=np.int64)
