"""Rank a request's pool."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Float32, Float64, Int64

from model_store.acquisition.choice import (
    MAX_JOINT_ROWS,
    NO_SEED,
    Choice,
    Selection,
    id_hashes,
    max_joint_candidates,
)
from model_store.acquisition.ranking import Pool, PoolScorer, Ranked, Scored
from model_store.errors import InvalidInput
from model_store.inference.noise import fresh_seed
from model_store.inference.prediction import check_computed
from model_store.inference.runtime import DrawSet
from model_store.scores.joint import BatchBald, Candidates
from model_store.state.labels import AcquiredRow, check_id
from model_store.types import JsonObject
from service.engine.batching import Engine, EngineWork
from service.engine.threads import FairThreads
from service.request_context import Phase

T = TypeVar("T")

HASH_BYTES = 32  # per row, while rows are ordered


class TopCandidates:
    """The candidates with the largest gains. Ties are broken by index."""

    def __init__(self, max_rows: int) -> None:
        self._max_rows, self._size = max_rows, 0
        self._rows = np.empty(max_rows, dtype=np.int64)
        self._gain, self._noise = np.empty(max_rows), np.empty(max_rows)
        self._outputs: Float32[np.ndarray, "M D"] | None = None

    def add(self, part: Candidates, first: int) -> None:
        if self._outputs is None:
            self._outputs = np.empty((self._max_rows, part.outputs.shape[1]), dtype=np.float32)
        size, n = self._size, len(part.gain)
        rows = np.append(self.rows, first + np.arange(n))
        gain = np.append(self._gain[:size], part.gain)
        self._size = min(size + n, self._max_rows)
        is_top = np.zeros(size + n, dtype=bool)
        is_top[np.lexsort((rows, -gain))[: self._size]] = True
        new = np.flatnonzero(is_top[size:])
        # The outputs are large, so they stay in their slots and new rows fill the free slots.
        free = np.append(np.flatnonzero(~is_top[:size]), np.arange(size, self._size))
        self._rows[free], self._gain[free] = first + new, part.gain[new]
        self._noise[free], self._outputs[free] = part.noise[new], part.outputs[new]

    @property
    def rows(self) -> Int64[np.ndarray, "M"]:
        """The indices of the candidates in the pool."""
        return self._rows[: self._size]

    @property
    def candidates(self) -> Candidates:
        assert self._outputs is not None
        return Candidates(*(x[: self._size] for x in (self._gain, self._noise, self._outputs)))


@dataclass(eq=False)
class PoolWork(EngineWork):
    """A pool to score. For a joint score, the scores are the gains of the individual rows."""

    max_candidates: int | None = None  # only for a joint score
    is_race: bool = False  # adds standard errors to the scores
    top: TopCandidates | None = field(default=None, init=False)  # only for a joint score

    @property
    def is_quick(self) -> bool:
        return super().is_quick and self.max_candidates is None

    @property
    def scores(self) -> Float64[np.ndarray, "N"]:
        ((scores, _),) = self.parts
        return np.asarray(scores)

    def compute(
        self, _: list[EngineWork], x: Float32[np.ndarray, "N I"], sets: list[DrawSet]
    ) -> list[Any]:
        assert self.acquisition is not None
        scorer = PoolScorer(self.model, self.acquisition, self.priors)
        if self.max_candidates is not None:
            candidates = scorer.candidates(x, sets[0])
            self.top = self.top or TopCandidates(self.max_candidates)
            self.top.add(candidates, self.rows_done)
            return [(candidates.gain, [])]
        return [scorer.race(x, sets[0]) if self.is_race else (scorer.scores(x, sets[0]), [])]

    def join_parts(self) -> None:
        self.parts = [tuple(map(np.concatenate, zip(*self.parts, strict=True)))]

    def memory_bytes(self, rows: int | None = None) -> int:
        rows = len(self.x) if rows is None else rows
        size = self._kept_draw_bytes(rows) + 32 * rows
        if self.max_candidates is None:
            return size
        draws, outputs = self.num_samples, self.model.manifest.output_size
        size += self.max_candidates * (48 + 4 * draws * outputs)
        return size + BatchBald.work_bytes(draws, outputs, min(self.max_candidates, MAX_JOINT_ROWS))


@dataclass(eq=False)
class EnginePool(Pool):
    """A request's pool, scored by the engine."""

    engine: Engine
    answers: FairThreads
    work: PoolWork
    ids: Sequence[str]
    choice: Choice
    phases: list[Phase] = field(default_factory=list)  # of all computations

    @property
    def seed(self) -> int:  # type: ignore[override]
        """The seed of the draws, or a new seed if no draws were needed."""
        if self.work.seed is None:
            self.work = replace(self.work, seed=fresh_seed())
        assert self.work.seed is not None
        return self.work.seed

    async def scores(self) -> Float64[np.ndarray, "N"]:
        return (await self._score(self.work)).scores

    async def scores_with_errors(self, rows: Int64[np.ndarray, "n"], num_draws: int) -> Scored:
        reservation = self.work.context.reservation
        size = reservation.used_bytes
        reservation.reserve(self.work.x[:1].nbytes * len(rows), "pool")
        x = await self.run(partial(np.take, self.work.x, rows, axis=0))
        race_work = replace(self.work, x=x, num_samples=num_draws, is_race=True)
        (scored,) = (await self._score(race_work)).parts
        reservation.shrink(size)
        return scored[0], scored[1]

    async def candidates(self) -> tuple[Int64[np.ndarray, "M"], Candidates]:
        x, ids, choice = self.work.x, self.ids, self.choice
        self.work.context.reservation.reserve(HASH_BYTES * len(x) + x.nbytes, "pool")
        # Hashes of ids decide between candidates with equal gains.
        order = await self.run(lambda: np.argsort(id_hashes(ids, NO_SEED)))
        max_candidates = max_joint_candidates(choice, self.work.model, len(x))
        x = await self.run(partial(np.take, x, order, axis=0))
        work = await self._score(replace(self.work, x=x, max_candidates=max_candidates))
        check_computed(work.scores, "pool", order)
        assert work.top is not None
        return order[work.top.rows], work.top.candidates

    async def run(self, work: Callable[[], T]) -> T:
        return await self.answers.run(self.work.context, self.work.x.nbytes, work)

    def pause(self) -> None:
        self.work.context.pause()

    async def _score(self, work: PoolWork) -> PoolWork:
        work.context.reservation.reserve(work.memory_bytes(), "pool")
        await self.engine.compute(work)
        self.phases.extend(work.phases)
        self.work = replace(self.work, seed=work.draw_seed)
        return work


def check_keep(keep: bool, control: float, ids: Sequence[str]) -> None:
    """Raise InvalidInput if `keep` is used with invalid ids, or `control` without `keep`."""
    if control and not keep:
        expected = "0 unless `keep` is true, since labels of control rows judge the model"
        raise InvalidInput("control", expected, "a share")
    for n, name in enumerate(ids if keep else ()):
        check_id(name, f"ids.{n}")


def answer_rows(ranked: Ranked, selection: Selection, ids: Sequence[str]) -> list[JsonObject]:
    """Return the ranked rows, then the control rows, in the format of /acquire."""
    indices = selection.ranked[[row["index"] for row in ranked.rows]].tolist()
    pairs = zip(ranked.rows, indices, strict=True)
    rows = [{**row, "index": i, "control": False} for row, i in pairs]
    control = [
        {"rank": rank, "index": i, "id": ids[i], "score": None, "control": True}
        for rank, i in enumerate(selection.control.tolist(), start=len(rows) + 1)
    ]
    return rows + control


def acquired_rows(
    pool: Float32[np.ndarray, "N I"] | Mapping[int, Float32[np.ndarray, "I"]],
    rows: list[JsonObject],
    predictions: list[JsonObject],
) -> list[AcquiredRow]:
    """Convert an answer's rows to database rows, with the predictions of control rows in order."""
    remaining = iter(predictions)
    return [
        AcquiredRow(
            *(row["id"], row["rank"], row["score"], pool[row["index"]], row["control"]),
            next(remaining) if row["control"] else None,
        )
        for row in rows
    ]
