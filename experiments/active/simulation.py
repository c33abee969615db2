"""A simulation: rounds of choosing rows, fitting on all labels so far, and measuring on the test
rows.

Everything random is a function of the seed and the round, so a simulation that was killed ends as
one that was not. Arms of one seed have the same first labels, and candidates come in the same
random order.
"""

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
from model_store.acquisition.choice import Copies, find_copies
from model_store.acquisition.ranking import Choice, Lap, Pool, Scored, rank_pool_sync
from model_store.errors import InvalidInput
from model_store.scores.joint import Candidates
from model_store.scores.tasks import PREDICTIVES, AnyScores
from training.data import Dataset
from training.fitting.steps import keep_freed_memory
from training.progress import Bar
from training.seeds import generator, hash_key

SCORED_AT_ONCE = 1000  # rows
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
    keep_freed_memory()
    rounds = 1 + max(0, end.labels - protocol.initial) // protocol.batch
    with Bar(rounds * len(work), "round", quiet) as bar:
        for one in work:
            record = one.record()
            bar.update(len(record.rounds))
            for done in simulate(one.arm, one.data, protocol, end, one.seed, record, device):
                bar.update()
                said = f"{one.arm.label}, seed {one.seed}: "
                bar.report(f"{said}{done.metric:.4g} at {done.labels} labels")
            bar.total -= rounds - len(record.rounds)  # which ended before its last round


def curves_of(work: Sequence[Work]) -> list[Curves]:
    curves: dict[str, Curves] = {}
    for one in work:
        curves.setdefault(one.arm.label, Curves(one.arm, {})).seeds[one.seed] = one.record().rounds
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
        begun_in = len(record.rounds) - 1 if arm.start == "cold" else 0
        learner.restore(record.tensors(), begun_in)
    while not has_ended(record.rounds, end, task, protocol.batch):
        number, labelled = len(record.rounds), np.array(record.labelled, dtype=np.int64)
        begun = time.perf_counter()
        if number == 0:
            new = initial_labels(data.train.y, len(data.classes), protocol.initial, seed)
        else:
            new = _acquire(arm, learner, data, protocol, labelled, seed, number)
        index = np.concatenate([labelled, new])
        chose = time.perf_counter()
        if number == 0 or arm.start == "cold":
            learner.begin(number)
        learner.fit(index, number, protocol.epochs)
        fitted = time.perf_counter()
        measure = learner.measure(protocol.test_draws, number)
        times = (chose - begun, fitted - chose, time.perf_counter() - fitted)
        seconds = (round(s, 3) for s in times)
        done = Round(len(index), measure.metric, measure.log_likelihood, new.tolist(), *seconds)
        record.add(done, learner.tensors())
        yield done


def _acquire(
    arm: Arm,
    learner: Learner,
    data: Dataset,
    protocol: Protocol,
    labelled: np.ndarray,
    seed: int,
    number: int,
) -> np.ndarray:
    among = candidate_rows(labelled, len(data.train), protocol.candidates, seed, number)
    x, task = data.train.x[among], arm.recipe.task
    eps = learner.noise(protocol.draws, seed, ActiveStream.POOL_NOISE, number)
    race = protocol.race if arm.acquisition in PREDICTIVES[task].race_acquisitions else None
    choice = Choice(task, arm.acquisition, protocol.batch, len(eps), race, protocol.beta)
    best = choose(
        lambda rows, draws: learner.predict(x[rows], eps[draws]),
        x.astype(np.float32),
        [str(i) for i in among],
        choice,
        hash_key(seed, ActiveStream.CHOICE, number),
    )
    return among[best]


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


def candidate_rows(labelled: Index, rows: int, count: int, seed: int, number: int) -> Index:
    unlabelled = np.setdiff1d(np.arange(rows), labelled)
    order = generator(seed, ActiveStream.CANDIDATES, number).permutation(rows)
    kept = order[np.isin(order, unlabelled)][:count]
    return np.sort(kept)


def choose(
    predict: Predict, x: Float32[np.ndarray, "N I"], ids: Sequence[str], choice: Choice, seed: int
) -> Index:
    """Return which rows an acquisition takes, best first; ids and seed decide ties."""
    ranked = rank_pool_sync(LearnerPool(predict, x, ids, choice, seed), choice)
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
        every, with_errors = np.arange(len(self._x)), name in self._predictive.jackknife_scores
        parts = self._scored(every, self._choice.num_samples, with_errors)
        return np.concatenate([self._predictive.acquisition(part, name) for part in parts])

    async def lap(self, lap: Lap) -> Scored:
        scored = self._scored(lap.rows, lap.num_draws, True)
        parts = [self._predictive.race(part, self._choice.acquisition) for part in scored]
        scores, errors = (np.concatenate(of) for of in zip(*parts, strict=True))
        return scores, errors

    async def copies(self) -> Copies:
        return find_copies(self._x)

    async def candidates(self, copies: Copies) -> tuple[Index, Candidates]:
        outputs = self._predict(copies.first, slice(0, self._choice.num_samples))
        score = self._predictive.joint_scores[self._choice.acquisition]
        return np.arange(len(copies.first)), score.from_samples(self._predictive.samples(outputs))

    def _scored(self, rows: Index, num_draws: int, with_errors: bool) -> list[AnyScores]:
        outputs = self._predict(rows, slice(0, num_draws))
        parts = np.array_split(outputs, -(-outputs.shape[1] // SCORED_AT_ONCE), axis=1)
        return [self._predictive.scores(self._predictive.sums(part), with_errors) for part in parts]
