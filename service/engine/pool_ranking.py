"""The pool of a request: its rows are scored by the engine, within the request's memory; some are
set aside, some kept."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Float32, Float64, Int64

from model_store.acquisition.choice import Copies, copies_of, most_candidates
from model_store.acquisition.ranking import Choice, Lap, Pool, Scored
from model_store.artifacts.manifest import Manifest
from model_store.conformal.mondrian import UNKNOWN
from model_store.errors import InvalidInput
from model_store.inference.prediction import Prediction, check_computed
from model_store.scores.joint import Candidates
from model_store.state.labels import AcquiredRow, check_id
from model_store.state.live import prediction_records
from service.call import Phase
from service.engine.batching import Engine, kept_bytes
from service.engine.jobs import Job, PoolScores
from service.engine.threads import FairThreads
from service.models.reservoir import fresh_seed

T = TypeVar("T")

COPY_BYTES = 200  # of a row while rows that are the same are looked for


@dataclass(eq=False)
class EnginePool(Pool):
    """The pool of a request that was admitted, within its reservation of memory."""

    engine: Engine
    answers: FairThreads
    job: Job  # with an acquisition
    ids: Sequence[str]
    choice: Choice
    phases: list[Phase] = field(default_factory=list)  # of all that was computed

    @property
    def seed(self) -> int:  # type: ignore[override]
        """The seed of the draws; a fresh one where none were needed."""
        if self.job.seed is None:
            self.job = replace(self.job, seed=fresh_seed())
        assert self.job.seed is not None
        return self.job.seed

    async def scores(self) -> Float64[np.ndarray, "N"]:
        return (await self._score(self.job)).scores

    async def lap(self, lap: Lap) -> Scored:
        """Return the scores of some rows, which are copied for as long as it takes."""
        held = self.job.call.reservation.held
        self.job.call.reservation.reserve(self.job.x[:1].nbytes * len(lap.rows), "pool")
        x = await self.run(partial(np.take, self.job.x, lap.rows, axis=0))
        job = replace(self.job, x=x, num_samples=lap.num_draws, is_race=True)
        scored = await self._score(job)
        self.job.call.reservation.shrink(held)
        assert scored.errors is not None
        return scored.scores, scored.errors

    async def copies(self) -> Copies:
        is_joint = self._most_candidates is not None
        size = COPY_BYTES * len(self.job.x) + is_joint * self.job.x.nbytes
        self.job.call.reservation.reserve(size, "pool")
        return await self.run(partial(copies_of, self.job.x, self.pause))

    async def candidates(self, copies: Copies) -> tuple[Int64[np.ndarray, "M"], Candidates]:
        x = await self.run(partial(np.take, self.job.x, copies.first, axis=0))
        distinct = replace(self.job, x=x, candidates=self._most_candidates)
        scored = await self._score(distinct)
        check_computed(scored.scores[copies.group], "pool")
        assert scored.best is not None
        return scored.best.rows, scored.best.candidates

    async def run(self, work: Callable[[], T]) -> T:
        """Do work on the threads for answers, by fair shares."""
        return await self.answers.run(self.job.call, self.job.x.nbytes, work)

    def pause(self) -> None:
        self.job.call.pause()

    @property
    def _most_candidates(self) -> int | None:
        choice, job = self.choice, self.job
        return most_candidates(
            choice.acquisition, job.served.model, len(job.x), choice.k, choice.num_samples
        )

    async def _score(self, job: Job) -> PoolScores:
        self.job.call.reservation.reserve(kept_bytes(job), "pool")
        scored = await self.engine.score(job)
        self.phases.extend(scored.phases)
        self.job = replace(self.job, seed=scored.seed)
        return scored


def check_keeping(keep: bool, control: float, ids: Sequence[str], are_named: bool) -> None:
    """Raise InvalidInput if rows are to be kept that cannot be, or a share `control` set aside and
    not kept."""
    if control and not keep:
        expected = "0 unless `keep` is true, since labels of control rows judge the model"
        raise InvalidInput("control", expected, "a share")
    if not keep:
        return
    if not are_named:
        raise InvalidInput("ids", "names of the rows, which `keep` needs", "none")
    for n, name in enumerate(ids):
        check_id(name, f"ids.{n}")


def control_said(manifest: Manifest, prediction: Prediction) -> list[dict[str, Any]]:
    """Return what is kept of the predictions of rows that are set aside."""
    # Which is not known
    if manifest.categories is not None and manifest.categories.kind == "group":
        prediction = prediction.of_groups(np.full(len(prediction.p_values.p_value), UNKNOWN))
    return prediction_records(prediction, manifest.classes)


def set_aside(places: Sequence[int], ids: Sequence[str], ranked: int) -> list[dict[str, Any]]:
    """Return rows that are set aside as /acquire answers them, behind those that are ranked."""
    return [
        {"rank": rank, "index": i, "id": ids[i], "score": None, "control": True}
        for rank, i in enumerate(places, start=ranked + 1)
    ]


def acquired_rows(
    pool: Float32[np.ndarray, "N I"] | Mapping[int, Float32[np.ndarray, "I"]],
    ranked: list[dict[str, Any]],
    said: list[dict[str, Any]],
) -> list[AcquiredRow]:
    """Return the rows of an answer as they are kept; `said` is of those that are set aside, in
    their order."""
    of_control = iter(said)
    return [
        AcquiredRow(
            *(row["id"], row["rank"], row["score"], pool[row["index"]], row["control"]),
            next(of_control) if row["control"] else None,
        )
        for row in ranked
    ]
