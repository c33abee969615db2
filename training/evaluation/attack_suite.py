"""The attacks that an evaluation report reports: what each does, and the rows that come of it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float32

from model_store.inference.noise import MAX_SEED
from training.data import Rows
from training.evaluation.attacks import (
    AttackDraws,
    Attacked,
    Statistic,
    fgsm,
    pgd,
    quiet_pgd,
    towards,
)
from training.evaluation.records import AttackFacts
from training.seeds import EvaluationStream, hash_key

STEPS = (0.05, 0.1, 0.2, 0.3, 0.5)
FGSM_DRAWS = (1, 32)
RADII = (0.1, 0.2)
ITERATIONS = 20
ITERATED_DRAWS = 4
TARGET = 0
COUNT = len(FGSM_DRAWS) * len(STEPS) + 1 + 2 * len(RADII)  # of all attacks


@dataclass(frozen=True, eq=False)
class AttackedRows:
    """Rows after an attack: its name, what it did, and for each row its place among the test
    rows."""

    name: str
    facts: AttackFacts
    x: Float32[np.ndarray, "N I"]
    index: np.ndarray


def attacks(
    attacked: Attacked, rows: Rows, statistic: Statistic | None, seed: int
) -> Iterator[AttackedRows]:
    """Yield attacked rows: FGSM by step size, with few and with many draws; towards a class; PGD;
    and, where the detectors' statistic is given, PGD that keeps them quiet."""
    x, y = torch.from_numpy(rows.x.astype(np.float32)), torch.from_numpy(rows.y)
    everything = np.arange(len(rows))
    fixed_seed = hash_key(seed, EvaluationStream.FIXED_DRAWS) % (MAX_SEED + 1)
    fresh_seed = hash_key(seed, EvaluationStream.FRESH_DRAWS) % (MAX_SEED + 1)
    start_seed = hash_key(seed, EvaluationStream.STARTS) % (MAX_SEED + 1)
    for count in FGSM_DRAWS:
        moved = fgsm(attacked, x, y, list(STEPS), AttackDraws(count, fixed_seed))
        for step, one in zip(STEPS, moved, strict=True):
            facts = AttackFacts(attack="fgsm", step=step, draws=count)
            yield AttackedRows(f"fgsm-{step:g}-of-{count}-draws", facts, one.numpy(), everything)
    draws = AttackDraws(ITERATED_DRAWS, fresh_seed, fresh=True)
    others = np.flatnonzero(rows.y != TARGET)
    if len(others):
        target = torch.full((len(others),), TARGET)
        moved = towards(attacked, x[others], target, ITERATIONS, draws)
        facts = _iterated("towards", target=TARGET, step=0.01)
        yield AttackedRows("towards-first-class", facts, moved.numpy(), others)
    for radius in RADII:
        moved = pgd(attacked, x, y, radius, ITERATIONS, draws, start_seed)
        facts = _iterated("pgd", radius=radius)
        yield AttackedRows(f"pgd-{radius:g}", facts, moved.numpy(), everything)
        if statistic is not None:
            moved = quiet_pgd(attacked, x, y, radius, ITERATIONS, draws, statistic, start_seed)
            facts = _iterated("quiet_pgd", radius=radius)
            yield AttackedRows(f"quiet-pgd-{radius:g}", facts, moved.numpy(), everything)


def _iterated(attack: str, **taken: Any) -> AttackFacts:
    """Return what an attack of many steps did."""
    return AttackFacts(
        attack=attack, **taken, draws=ITERATED_DRAWS, fresh=True, iterations=ITERATIONS
    )
