"""Simulation of active learning.

All random numbers depend only on the seed and the round, so a killed simulation resumes with the
same results. Arms with the same seed share the initial labels and the random order of candidates.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float32, Float64, Int64

from experiments.active.learner import Learner
from experiments.active.protocol import ActiveStream, Arm, End, Protocol
from experiments.active.rounds import Curves, Record, Round, has_ended
from model_store.acquisition.choice import Choice
from model_store.acquisition.ranking import Pool, Scored, rank_pool
from model_store.errors import InvalidInput
from model_store.scores.joint import BatchBald, Candidates
from model_store.scores.tasks import PREDICTIVES, AnyScores, race_scores
from training.data.rows import Dataset
from training.progress import Bar
from training.seeds import generator, hash_key

CHUNK_ROWS = 1000
Index = Int64[np.ndarray, "_"]
Predict = Callable[[Index, slice], Float32[np.ndarray, "_ _ _"]]  # outputs


@dataclass(frozen=True, eq=False)
class Work:
    arm: Arm
    data: Dataset
    seed: int
    folder: Path

    def record(self) -> Record:
        return Record(self.folder, f"{self.arm.acquisition}-{self.arm.start}-{self.seed}")


def simulate_all(
    work: Sequence[Work], protocol: Protocol, end: End, device: torch.device, quiet: bool
) -> None:
    rounds = 1 + max(0, end.labels - protocol.initial) // protocol.batch
    with Bar(rounds * len(work), "round", quiet) as bar:
        for item in work:
            record = item.record()
            bar.update(len(record.rounds))
            for step in simulate(item.arm, item.data, protocol, end, item.seed, record, device):
                bar.update()
                label = f"{item.arm.label}, seed {item.seed}"
                bar.report(f"{label}: {step.metric:.4g} at {step.labels} labels")
            bar.total -= rounds - len(record.rounds)  # a simulation can end early


def load_curves(work: Sequence[Work]) -> list[Curves]:
    curves: dict[str, Curves] = {}
    for item in work:
        curve = curves.setdefault(item.arm.label, Curves(item.arm, {}))
        curve.seeds[item.seed] = item.record().rounds
    return list(curves.values())


def simulate(
    arm: Arm,
    data: Dataset,
    protocol: Protocol,
    end: End,
    seed: int,
    record: Record,
    device: torch.device,
) -> Iterator[Round]:
    learner = Learner(arm.recipe, data, seed, device)
    task = arm.recipe.task
    if record.rounds and not has_ended(record.rounds, end, task, protocol.batch):
        start = len(record.rounds) - 1 if arm.start == "cold" else 0
        learner.restore(record.state(), start)
    while not has_ended(record.rounds, end, task, protocol.batch):
        number, labelled = len(record.rounds), np.array(record.labelled, dtype=np.int64)
        start_s = time.perf_counter()
        if number == 0:
            new = initial_labels(data.train.y, len(data.classes), protocol.initial, seed)
        else:
            new = _acquire(arm, learner, data, protocol, labelled, seed, number)
        index = np.concatenate([labelled, new])
        chosen_s = time.perf_counter()
        if number == 0 or arm.start == "cold":
            learner.begin(number)
        learner.fit(index, number, protocol.epochs)
        fitted_s = time.perf_counter()
        measure = learner.measure(protocol.test_draws, number)
        times = (chosen_s - start_s, fitted_s - chosen_s, time.perf_counter() - fitted_s)
        seconds = (round(s, 3) for s in times)
        step = Round(len(index), measure.metric, measure.log_likelihood, new.tolist(), *seconds)
        record.add(step, learner.state())
        yield step


def _acquire(
    arm: Arm,
    learner: Learner,
    data: Dataset,
    protocol: Protocol,
    labelled: np.ndarray,
    seed: int,
    number: int,
) -> np.ndarray:
    candidates = candidate_rows(labelled, len(data.train), protocol.candidates, seed, number)
    x, task = data.train.x[candidates], arm.recipe.task
    eps = learner.noise(protocol.draws, seed, ActiveStream.POOL_NOISE, number)
    race = protocol.race if arm.acquisition in PREDICTIVES[task].race_acquisitions else None
    choice = Choice(task, arm.acquisition, protocol.batch, len(eps), race, protocol.beta)
    best = choose(
        lambda rows, draws: learner.predict(x[rows], eps[draws]),
        [str(i) for i in candidates],
        choice,
        hash_key(seed, ActiveStream.CHOICE, number),
    )
    return candidates[best]


def initial_labels(y: np.ndarray, classes: int, count: int, seed: int) -> Index:
    """Select the first rows to label: balanced by class, or at random for regression."""
    if not 1 <= count <= len(y):
        expected = f"1 to {len(y)}, the number of training rows"
        raise InvalidInput("--initial", expected, str(count))
    order = generator(seed, ActiveStream.INITIAL_LABELS).permutation(len(y))
    if not classes:
        if np.ptp(y[order[:count]]) == 0:
            expected = "enough labels to include two values"
            raise InvalidInput("--initial", expected, f"{count} equal labels")
        return order[:count]
    if count < classes:
        raise InvalidInput("--initial", f"at least {classes}, one label per class", str(count))
    rank = np.empty(len(y), dtype=np.int64)  # within the row's class
    for c in range(classes):
        class_rows = order[y[order] == c]
        rank[class_rows] = np.arange(len(class_rows))
    return order[np.argsort(rank[order], kind="stable")][:count]


def candidate_rows(labelled: Index, rows: int, count: int, seed: int, number: int) -> Index:
    unlabelled = np.setdiff1d(np.arange(rows), labelled)
    order = generator(seed, ActiveStream.CANDIDATES, number).permutation(rows)
    return np.sort(order[np.isin(order, unlabelled)][:count])


def choose(predict: Predict, ids: Sequence[str], choice: Choice, seed: int) -> Index:
    """Select rows by an acquisition function, best first.

    Ids and the seed break ties.
    """
    ranked = asyncio.run(rank_pool(LearnerPool(predict, ids, choice, seed), choice))
    return np.array([row["index"] for row in ranked.rows], dtype=np.int64)


class LearnerPool(Pool):
    def __init__(self, predict: Predict, ids: Sequence[str], choice: Choice, seed: int) -> None:
        self.ids, self.seed = ids, seed
        self._predict, self._choice = predict, choice
        self._predictive = PREDICTIVES[choice.task]

    async def scores(self) -> Float64[np.ndarray, "N"]:
        name = self._choice.acquisition
        rows, with_errors = np.arange(len(self.ids)), name in self._predictive.jackknife_scores
        parts = self._scored(rows, self._choice.num_samples, with_errors)
        return np.concatenate([self._predictive.acquisition(part, name) for part in parts])

    async def scores_with_errors(self, rows: Index, num_draws: int) -> Scored:
        scored = self._scored(rows, num_draws, True)
        name = self._predictive.acquisition_scores[self._choice.acquisition]
        parts = [race_scores(part, name) for part in scored]
        scores, errors = (np.concatenate(column) for column in zip(*parts, strict=True))
        return scores, errors

    async def candidates(self) -> tuple[Index, Candidates]:
        rows = np.arange(len(self.ids))
        outputs = self._predict(rows, slice(0, self._choice.num_samples))
        return rows, BatchBald.from_probs(self._predictive.samples(outputs))

    def _scored(self, rows: Index, num_draws: int, with_errors: bool) -> list[AnyScores]:
        outputs = self._predict(rows, slice(0, num_draws))
        parts = np.array_split(outputs, -(-outputs.shape[1] // CHUNK_ROWS), axis=1)
        return [self._predictive.scores(self._predictive.sums(part), with_errors) for part in parts]
