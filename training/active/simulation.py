"""A simulation: rounds of choosing rows, fitting on all labels so far, and measuring on the test
rows.

Everything random is a function of the seed and the round, so a simulation that was killed ends as
one that was not. Arms of one seed have the same first labels, and candidates come in the same
random order.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from model_store.acquisition.ranking import Choice
from model_store.scores.tasks import PREDICTIVES
from training.active.learner import Learner
from training.active.pool import candidates, choose, initial_labels
from training.active.protocol import Arm, End, Protocol
from training.active.rounds import Curves, Record, Round, has_ended
from training.data import Dataset
from training.progress import Bar
from training.seeds import ActiveStream, hash_key


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
        for one in work:
            record = one.record()
            bar.update(len(record.rounds))
            for done in simulate(one.arm, one.data, protocol, end, one.seed, record, device):
                bar.update()
                said = f"{one.arm.label}, seed {one.seed}: "
                bar.say(f"{said}{done.metric:.4g} at {done.labels} labels")
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
    among = candidates(labelled, len(data.train), protocol.candidates, seed, number)
    x, task = data.train.x[among], arm.recipe.task
    eps = learner.noise(protocol.draws, seed, ActiveStream.POOL_NOISE, number)
    race = protocol.race if arm.acquisition in PREDICTIVES[task].raced else None
    choice = Choice(task, arm.acquisition, protocol.batch, len(eps), race, protocol.beta)
    best = choose(
        lambda rows, draws: learner.predict(x[rows], eps[draws]),
        x.astype(np.float32),
        [str(i) for i in among],
        choice,
        hash_key(seed, ActiveStream.CHOICE, number),
    )
    return among[best]
