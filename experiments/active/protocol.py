"""Settings for an active learning simulation."""

from dataclasses import dataclass
from enum import IntEnum, unique
from typing import Literal

from model_store.acquisition.choice import RANDOM
from model_store.types import Task
from training.recipe import Recipe

Start = Literal["warm", "cold"]


@unique
class ActiveStream(IntEnum):
    """The random streams of a simulation, keyed by seed, stream and round."""

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
    batch: int = 10  # labels per acquisition
    candidates: int = 2000  # random pool rows scored per acquisition
    draws: int = 100  # for candidates
    test_draws: int = 100  # for test rows
    epochs: int = 50  # per fit
    race: float | None = None  # error probability of races
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

    def controls(self, arm: "Arm") -> bool:
        is_same = (self.recipe.name, self.start) == (arm.recipe.name, arm.start)
        return self.is_control and not arm.is_control and is_same


def is_at(metric: float, target: float, task: Task) -> bool:
    return metric >= target if task == "classification" else metric <= target
