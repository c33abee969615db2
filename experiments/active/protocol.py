"""The settings of a simulation: acquisitions, arms and when they end."""

from dataclasses import dataclass
from enum import IntEnum, unique
from typing import Literal

from model_store.acquisition.choice import RANDOM
from model_store.types import Task
from training.recipe import Recipe

Start = Literal["warm", "cold"]


@unique
class ActiveStream(IntEnum):
    """Random streams of a simulation's seed; the round's number is the rest of a key."""

    INITIAL_LABELS = 0
    CANDIDATES = 1
    CHOICE = 2  # ties and random acquisitions
    POOL_NOISE = 3
    TEST_NOISE = 4
    FIT = 5  # the seed of a round's recipe
    STANDARDISING_ROWS = 6  # of the pool


@dataclass(frozen=True)
class Protocol:
    initial: int = 20  # labels before the first acquisition
    batch: int = 10  # labels of an acquisition
    candidates: int = 2000  # random rows of the pool that an acquisition looks at
    draws: int = 100  # that score candidates
    test_draws: int = 100  # that predict test rows
    epochs: int = 50  # of each fit
    race: float | None = None  # how often a race may go wrong, where acquisitions are raced
    beta: float = 1.0  # of power_bald


@dataclass(frozen=True)
class End:
    labels: int
    target: float | None = None
    rounds: int = 3


@dataclass(frozen=True, eq=False)
class Arm:
    recipe: Recipe
    acquisition: str
    start: Start

    @property
    def label(self) -> str:
        return f"{self.recipe.name}, {self.start}, {self.acquisition}"

    @property
    def is_control(self) -> bool:
        return self.acquisition == RANDOM

    def controls(self, other: "Arm") -> bool:
        mine, its = ((arm.recipe.name, arm.start) for arm in (self, other))
        return self.is_control and not other.is_control and mine == its


def is_at(metric: float, target: float, task: Task) -> bool:
    return metric >= target if task == "classification" else metric <= target
