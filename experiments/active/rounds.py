"""Records of a simulation's rounds, and the number of labels needed and saved.

If a seed ends below the target, its number of labels is a lower bound.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats

from experiments.active.protocol import Arm, End, is_at
from model_store.errors import InvalidInput
from model_store.types import Task
from training.evaluation.metrics import LEVEL
from training.fitting.checkpoint import read_checkpoint, write_checkpoint


@dataclass(frozen=True)
class Round:
    labels: int  # so far
    metric: float  # accuracy, or root mean squared error
    log_likelihood: float  # nats per test row
    rows: list[int]  # training rows labelled in this round
    choose_s: float
    fit_s: float
    measure_s: float


class Record:
    """The recorded rounds of one arm and seed.

    `NAME.jsonl` has one line per round. `NAME-ROUND.safetensors` has the weights and the optimiser
    after the last round. The weights are written before the line, so a killed simulation resumes
    with its last finished round.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.path = folder / f"{name}.jsonl"
        self.rounds: list[Round] = []
        content = self.path.read_bytes() if self.path.exists() else b""
        complete = content[: content.rfind(b"\n") + 1]  # a kill can cut off the last line
        try:
            self.rounds = [Round(**json.loads(line)) for line in complete.splitlines()]
        except (ValueError, TypeError):
            expected = "one round per line (delete the file to start again)"
            raise InvalidInput(str(self.path), expected, "other lines") from None
        self._size = len(complete)

    @property
    def labelled(self) -> list[int]:
        return [row for step in self.rounds for row in step.rows]

    def state(self) -> dict[str, Any]:
        return read_checkpoint(self._weights(len(self.rounds) - 1), torch.device("cpu"))

    def add(self, new: Round, state: dict[str, Any]) -> None:
        number = len(self.rounds)
        write_checkpoint(self._weights(number), state)
        with self.path.open("ab") as file:
            file.truncate(self._size)
            self._size += file.write(f"{json.dumps(asdict(new))}\n".encode())
            file.flush()
            os.fsync(file.fileno())
        self.rounds.append(new)
        for path in self.path.parent.glob(f"{self.path.stem}-[0-9][0-9][0-9][0-9].safetensors"):
            if path != self._weights(number):
                path.unlink()

    def _weights(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.stem}-{number:04d}.safetensors")


@dataclass(frozen=True, eq=False)
class Curves:
    arm: Arm
    seeds: dict[int, list[Round]]

    @property
    def counts(self) -> list[int]:
        shortest = min(self.seeds.values(), key=len)
        return [step.labels for step in shortest]

    def metrics(self, labels: int) -> list[float]:
        """Return each seed's metric after `labels` labels."""
        return [
            next(step.metric for step in rounds if step.labels == labels)
            for rounds in self.seeds.values()
        ]


@dataclass(frozen=True)
class Needed:
    labels: int  # in the first round at the target, else in the last
    is_reached: bool  # otherwise more than `labels` are needed


@dataclass(frozen=True)
class Mean:
    value: float
    bound: str  # "at least", "at most", "more than", "unknown", or "" if exact


@dataclass(frozen=True)
class Saved:
    """The number of labels saved relative to random selection with the same seeds."""

    mean: Mean
    low: float | None  # None if the interval is open, or for one seed
    high: float | None
    seeds: int


def count_needed(rounds: Sequence[Round], target: float, task: Task) -> Needed:
    labels = next((step.labels for step in rounds if is_at(step.metric, target, task)), None)
    return Needed(rounds[-1].labels if labels is None else labels, labels is not None)


def has_ended(rounds: Sequence[Round], end: End, task: Task, batch: int) -> bool:
    if not rounds:
        return False
    last = rounds[-end.rounds :]
    if end.target is not None and len(last) == end.rounds:
        target = end.target
        if all(is_at(step.metric, target, task) for step in last):
            return True
    return rounds[-1].labels + batch > end.labels


def mean_needed(seeds: Sequence[Needed]) -> Mean:
    value = float(np.mean([seed.labels for seed in seeds]))
    reached = sum(seed.is_reached for seed in seeds)
    return Mean(value, "" if reached == len(seeds) else "at least" if reached else "more than")


def measure_saved(arm: Sequence[Needed], control: Sequence[Needed]) -> Saved:
    """Compute how many labels an arm saves over random choice with the same seeds.

    The interval is Student's t interval of the differences. If a seed of random choice ends below
    the target, the mean is a lower bound and the interval has no upper end. If a seed of the arm
    does, the mean is an upper bound and the interval has no lower end.
    """
    pairs = zip(arm, control, strict=True)
    differences = np.array([random.labels - seed.labels for seed, random in pairs], dtype=float)
    is_lower_bound, is_upper_bound = (
        not all(seed.is_reached for seed in seeds) for seeds in (control, arm)
    )
    bound = (("", "at most"), ("at least", "unknown"))[is_lower_bound][is_upper_bound]
    low = high = None
    if len(differences) > 1:
        quantile = float(stats.t.ppf((1.0 + LEVEL) / 2.0, len(differences) - 1))
        half = quantile * float(differences.std(ddof=1)) / len(differences) ** 0.5
        low = None if is_upper_bound else float(differences.mean() - half)
        high = None if is_lower_bound else float(differences.mean() + half)
    return Saved(Mean(float(differences.mean()), bound), low, high, len(differences))
