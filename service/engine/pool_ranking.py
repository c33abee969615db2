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
from service.engine.batching import Engine, EngineWork, kept_bytes
from service.engine.threads import FairThreads
from service.models.reservoir import fresh_seed
from service.request_context import Phase

T = TypeVar("T")

COPY_BYTES = 200  # of a row while rows that are the same are looked for


@dataclass(eq=False)
class EnginePool(Pool):
    """The pool of a request that was admitted, within its reservation of memory."""

    engine: Engine
    answers: FairThreads
    work: EngineWork  # with an acquisition
    ids: Sequence[str]
    choice: Choice
    phases: list[Phase] = field(default_factory=list)  # of all that was computed

    @property
    def seed(self) -> int:  # type: ignore[override]
        """The seed of the draws; a fresh one where none were needed."""
        if self.work.seed is None:
            self.work = replace(self.work, seed=fresh_seed())
        assert self.work.seed is not None
        return self.work.seed

    async def scores(self) -> Float64[np.ndarray, "N"]:
        return (await self._score(self.work)).pool_scores.scores

    async def lap(self, lap: Lap) -> Scored:
        """Return the scores of some rows, which are copied for as long as it takes."""
        held = self.work.call.reservation.held
        self.work.call.reservation.reserve(self.work.x[:1].nbytes * len(lap.rows), "pool")
        x = await self.run(partial(np.take, self.work.x, lap.rows, axis=0))
        raced = replace(self.work, x=x, num_samples=lap.num_draws, is_race=True)
        scored = (await self._score(raced)).pool_scores
        self.work.call.reservation.shrink(held)
        assert scored.errors is not None
        return scored.scores, scored.errors

    async def copies(self) -> Copies:
        is_joint = self._max_candidates is not None
        size = COPY_BYTES * len(self.work.x) + is_joint * self.work.x.nbytes
        self.work.call.reservation.reserve(size, "pool")
        return await self.run(partial(copies_of, self.work.x, self.pause))

    async def candidates(self, copies: Copies) -> tuple[Int64[np.ndarray, "M"], Candidates]:
        x = await self.run(partial(np.take, self.work.x, copies.first, axis=0))
        distinct = replace(self.work, x=x, max_candidates=self._max_candidates)
        scored = await self._score(distinct)
        check_computed(scored.pool_scores.scores[copies.group], "pool")
        assert scored.best is not None
        return scored.best.rows, scored.best.candidates

    async def run(self, work: Callable[[], T]) -> T:
        """Do work on the threads for answers, by fair shares."""
        return await self.answers.run(self.work.call, self.work.x.nbytes, work)

    def pause(self) -> None:
        self.work.call.pause()

    @property
    def _max_candidates(self) -> int | None:
        choice, work = self.choice, self.work
        return most_candidates(
            choice.acquisition, work.served.model, len(work.x), choice.k, choice.num_samples
        )

    async def _score(self, work: EngineWork) -> EngineWork:
        work.call.reservation.reserve(kept_bytes(work), "pool")
        await self.engine.compute(work)
        self.phases.extend(work.phases)
        self.work = replace(self.work, seed=work.draw_seed)
        return work


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
