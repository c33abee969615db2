"""Ranking a pool within a request: which scores its acquisition needs of the engine, and what
follows from them."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Float64

from model_store.acquisition.choice import (
    RANDOM,
    Copies,
    Raced,
    candidates_of,
    copies_of,
    joint_ranking,
    power_ranking,
    race,
    race_stages,
    ranking,
)
from model_store.inference.prediction import check_computed
from service.engine.batching import Engine, kept_bytes
from service.engine.jobs import Job, PoolScores
from service.engine.threads import FairThreads
from service.models.reservoir import fresh_seed
from service.telemetry.records import Phase

T = TypeVar("T")

COPY_BYTES = 200  # of a row while rows that are the same are looked for


@dataclass(frozen=True, eq=False)
class Ranked:
    """The rows of a ranking, the seed of all draws, and of a race how many rows took all of
    them."""

    rows: list[dict[str, Any]]
    seed: int
    finalists: int | None = None


@dataclass(eq=False)
class PoolRanking:
    """Ranks a pool for a request that was admitted; what it takes of memory is taken of the
    request's reservation first."""

    engine: Engine
    answers: FairThreads
    phases: list[Phase] = field(default_factory=list)  # of all that was computed

    async def ranked(
        self, job: Job, ids: list[str], k: int, probability: float | None, beta: float = 1.0
    ) -> Ranked:
        """Return the k best of a job's rows; fewer of a smaller pool, none of an empty one.

        Args:
            job: with an acquisition.
            probability: with which a race may leave a row out; None: there is no race.
            beta: of the acquisition `power_bald`.

        Raises:
            InvalidInput: naming a row that the model cannot score, or an option that the
                acquisition has not.
        """
        acquisition, model = job.acquisition, job.served.model
        assert acquisition is not None
        stages = race_stages(probability, acquisition, model.manifest.task, job.num_samples)
        finalists = None
        if acquisition == RANDOM or k == 0 or len(job.x) == 0:  # needs a seed and no draws
            seed = fresh_seed() if job.seed is None else job.seed
            rank = partial(_by_scores, None, ids, seed, min(k, len(ids)))
        elif stages and probability is not None:
            raced, seed = await self._race(job, k, stages, probability)
            finalists, rank = raced.finalists, partial(_by_scores, raced.scores, ids, seed, k)
        elif acquisition in model.predictive.batches:
            most = candidates_of(acquisition, model, len(job.x), k, job.num_samples)
            job.call.reservation.reserve(
                COPY_BYTES * len(job.x) + (0 if most is None else job.x.nbytes), "pool"
            )
            copies = await self._run(job, partial(copies_of, job.x, job.call.pause))
            distinct = job if most is None else replace(job, x=job.x[copies.first], candidates=most)
            scored = await self._score(distinct)
            seed, rank = scored.seed, partial(_batch, distinct, scored, copies, ids, k, beta)
        else:
            scored = await self._score(job)
            seed, rank = scored.seed, partial(_by_scores, scored.scores, ids, scored.seed, k)
        return Ranked(await self._run(job, rank), seed, finalists)

    async def _race(
        self, job: Job, k: int, stages: tuple[int, ...], probability: float
    ) -> tuple[Raced, int]:
        """Return what comes of a race, and the seed of its draws."""
        laps = race(len(job.x), k, stages, job.num_samples, probability)
        lap, seed = next(laps), job.seed
        while True:
            is_last = lap.num_draws == job.num_samples
            held = job.call.reservation.held
            job.call.reservation.reserve(job.x[:1].nbytes * len(lap.rows), "pool")
            scored = await self._score(
                replace(
                    job,
                    x=job.x[lap.rows],
                    seed=seed,
                    num_samples=lap.num_draws,
                    is_race=not is_last,
                )
            )
            job.call.reservation.shrink(held)
            seed = scored.seed
            try:
                lap = laps.send((scored.scores, scored.errors))
            except StopIteration as ended:
                return ended.value, seed

    async def _score(self, job: Job) -> PoolScores:
        job.call.reservation.reserve(kept_bytes(job), "pool")
        scored = await self.engine.score(job)
        self.phases.extend(scored.phases)
        return scored

    async def _run(self, job: Job, work: Callable[[], T]) -> T:
        return await self.answers.run(job.call, job.x.nbytes, work)


def _by_scores(
    scores: Float64[np.ndarray, "N"] | None, ids: list[str], seed: int, k: int
) -> list[dict[str, Any]]:
    """Return the ranking of a pool by a score of each row; without scores it is random."""
    return ranking(scores, ids, seed, k) if ids and k else []


def _batch(
    job: Job, scored: PoolScores, copies: Copies, ids: list[str], k: int, beta: float
) -> list[dict[str, Any]]:
    """Return the ranking of a pool of which a batch is chosen; for a joint score the job is of
    `copies.first`."""
    if scored.best is None:
        return power_ranking(scored.scores, copies, ids, scored.seed, k, beta)
    check_computed(scored.scores[copies.group], "pool")
    assert job.acquisition is not None
    kind = job.served.model.predictive.joint_scores[job.acquisition]
    joint = kind(scored.best.candidates, job.num_samples, scored.seed)
    return joint_ranking(joint, scored.best.rows, copies, ids, k, job.call.pause)
