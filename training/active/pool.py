"""Which rows get labels first, which ones an acquisition looks at, and how it scores these."""

from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float32, Float64, Int64

from model_store.acquisition.choice import Copies, copies_of
from model_store.acquisition.ranking import Choice, Lap, Pool, Scored, rank_now
from model_store.errors import InvalidInput
from model_store.scores.joint import Candidates
from model_store.scores.tasks import PREDICTIVES, AnyScores
from training.seeds import ActiveStream, generator

SCORED_AT_ONCE = 1000  # rows
Index = Int64[np.ndarray, "_"]
Predict = Callable[[Index, slice], Float32[np.ndarray, "_ _ _"]]  # outputs


def initial_labels(y: np.ndarray, classes: int, count: int, seed: int) -> Index:
    """Return the rows that get the first labels: equally many of each class, or of a regression
    random ones."""
    if not 1 <= count <= len(y):
        expected = f"from 1 to {len(y)}, as many as there are training rows"
        raise InvalidInput("--initial", expected, str(count))
    order = generator(seed, ActiveStream.INITIAL_LABELS).permutation(len(y))
    if not classes:
        if np.ptp(y[order[:count]]) == 0:
            expected = "enough labels that not all are the same"
            raise InvalidInput("--initial", expected, f"{count} that are")
        return order[:count]
    if count < classes:
        raise InvalidInput("--initial", f"at least {classes}, one label of each class", str(count))
    place = np.empty(len(y), dtype=np.int64)  # of each row among those of its class
    for c in range(classes):
        of_class = order[y[order] == c]
        place[of_class] = np.arange(len(of_class))
    return order[np.argsort(place[order], kind="stable")][:count]


def candidates(labelled: Index, rows: int, count: int, seed: int, number: int) -> Index:
    unlabelled = np.setdiff1d(np.arange(rows), labelled)
    order = generator(seed, ActiveStream.CANDIDATES, number).permutation(rows)
    kept = order[np.isin(order, unlabelled)][:count]
    return np.sort(kept)


def choose(
    predict: Predict, x: Float32[np.ndarray, "N I"], ids: Sequence[str], choice: Choice, seed: int
) -> Index:
    """Return which rows an acquisition takes, best first; ids and seed decide ties."""
    ranked = rank_now(LearnerPool(predict, x, ids, choice, seed), choice)
    return np.array([row["index"] for row in ranked.rows], dtype=np.int64)


class LearnerPool(Pool):
    def __init__(
        self,
        predict: Predict,
        x: Float32[np.ndarray, "N I"],
        ids: Sequence[str],
        choice: Choice,
        seed: int,
    ) -> None:
        self.ids, self.seed = ids, seed
        self._predict, self._x, self._choice = predict, x, choice
        self._predictive = PREDICTIVES[choice.task]

    async def scores(self) -> Float64[np.ndarray, "N"]:
        name = self._choice.acquisition
        every, with_errors = np.arange(len(self._x)), name in self._predictive.jackknifed
        parts = self._scored(every, self._choice.num_samples, with_errors)
        return np.concatenate([self._predictive.acquisition(part, name) for part in parts])

    async def lap(self, lap: Lap) -> Scored:
        scored = self._scored(lap.rows, lap.num_draws, True)
        parts = [self._predictive.race(part, self._choice.acquisition) for part in scored]
        scores, errors = (np.concatenate(of) for of in zip(*parts, strict=True))
        return scores, errors

    async def copies(self) -> Copies:
        return copies_of(self._x)

    async def candidates(self, copies: Copies) -> tuple[Index, Candidates]:
        outputs = self._predict(copies.first, slice(0, self._choice.num_samples))
        score = self._predictive.joint_scores[self._choice.acquisition]
        return np.arange(len(copies.first)), score.of(self._predictive.samples(outputs))

    def _scored(self, rows: Index, num_draws: int, with_errors: bool) -> list[AnyScores]:
        outputs = self._predict(rows, slice(0, num_draws))
        parts = np.array_split(outputs, -(-outputs.shape[1] // SCORED_AT_ONCE), axis=1)
        return [self._predictive.scores(self._predictive.sums(part), with_errors) for part in parts]
