"""`POST /acquire`: rank an unlabelled pool."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from fastapi import APIRouter, Request, Response
from jaxtyping import Int64
from pydantic import BaseModel

from model_store.acquisition.choice import RANDOM
from model_store.acquisition.control import Selection, select
from model_store.acquisition.ranking import Choice, rank_pool
from model_store.errors import InvalidInput
from model_store.sources.columns import fill_missing, unknown_categories
from model_store.sources.files import check_ids
from model_store.sources.row_file import RowFile, text_bytes
from model_store.state.labels import Acquisition, row_format, save_acquired
from service.api.media_types import JSON
from service.api.openapi import request_body
from service.api.options import resolve_num_samples
from service.api.predict import RowWork, read_work, to_numbers
from service.api.requests import negotiate_media_type
from service.api.responses import json_response
from service.api.rows import add_row_id, name_rows
from service.api.schemas import AcquireRequest
from service.auth.scopes import needs
from service.batch.computation import ComputationRequest, acquire_answer, ranking_fields
from service.context import Context, get_context
from service.engine.batching import BATCH_ROW_DRAWS, EngineWork, work_bytes
from service.engine.pool_ranking import (
    EnginePool,
    acquired_rows,
    check_keep,
    control_predictions,
    control_rows,
)
from service.models.reservoir import fresh_seed

ID_BYTES = 200  # per id
CHECK_BYTES = 100  # per id, while duplicates are searched


class RankedRow(BaseModel):
    """A ranked row of the pool. Control rows have no score."""

    rank: int
    index: int
    id: str
    score: float | None
    control: bool


class AcquireAnswer(BaseModel):
    """A ranking of the pool."""

    model: str
    version: str
    acquisition: str
    num_samples: int
    seed: int
    pool_size: int
    excluded: int | None
    priors: dict[str, float] | None
    race: float | None
    beta: float | None
    finalists: int | None
    unknown_categories: dict[str, int]
    ranking: list[RankedRow]


router = APIRouter(tags=["Acquire"])


@router.post(
    "/acquire",
    response_model=AcquireAnswer,
    openapi_extra=request_body(AcquireRequest),
    dependencies=[needs("acquire")],
)
async def post_acquire(request: Request) -> Response:
    """Rank the rows of an unlabelled pool by the benefit of labelling them."""
    context = get_context(request)
    settings = context.settings
    call = context.begin(request, has_rows=True)
    negotiate_media_type(request, JSON)
    work = await read_work(context, call, AcquireRequest, "pool", settings.max_pool_rows)
    envelope, loaded, pool_size = work.envelope, work.loaded, len(work.rows)
    model, manifest = loaded.model, loaded.model.manifest
    fields = ranking_fields(envelope, model)
    acquisition, priors, beta = (fields[name] for name in ("acquisition", "priors", "beta"))
    num_samples = resolve_num_samples(envelope, model, settings)
    with context.admission.admit(
        pool_size, num_samples, BATCH_ROW_DRAWS, call.client, model.encoding_draws, call.length
    ):
        reservation = call.reservation
        names = await find_names(context, work)
        try:
            x = await to_numbers(context, work)
            fill_missing(x, manifest.input.columns)
        except InvalidInput as error:
            raise (add_row_id(error, names) if isinstance(work.rows, RowFile) else error) from None
        work.rows = []
        reservation.shrink(x.nbytes)
        reservation.reserve(ID_BYTES * len(x) + text_bytes(names or ()), "ids")
        if names is None and envelope.keep:
            name = partial(name_rows, [x], manifest.input, call)
            names = await context.threads.requests.run(call, ID_BYTES * pool_size, name)
        pool_x, has_ids = x, names is not None
        ids = RowNumbers(pool_size) if names is None else names
        seed = fresh_seed() if envelope.seed is None and envelope.control else envelope.seed
        find = partial(select_rows, context, envelope, loaded.name, ids, has_ids, seed or 0)
        selection = await context.threads.state(find)
        if len(selection.ranked) < len(x):
            reservation.reserve(x.nbytes, "pool")
            copy = partial(np.take, x, selection.ranked, axis=0)
            x = await context.threads.requests.run(call, x.nbytes, copy)
        places = selection.ranked
        ranked_ids = ids if len(x) == len(pool_x) else [ids[i] for i in places.tolist()]
        scored = EngineWork(
            loaded, x, num_samples, seed, call, acquisition=acquisition, priors=priors
        )
        k = envelope.k - len(selection.control)
        choice = Choice(manifest.task, acquisition, k, num_samples, envelope.race, beta)
        to_rank = EnginePool(context.engine, context.threads.answers, scored, ranked_ids, choice)
        try:
            ranked = await rank_pool(to_rank, choice)
        except InvalidInput as error:
            raise _add_pool_index(error, places) from None
        columns = manifest.input.columns
        unknown = {} if acquisition == RANDOM else unknown_categories(x, columns)
        indices = places[[row["index"] for row in ranked.rows]].tolist()
        answered = [
            {**row, "index": i, "control": False}
            for row, i in zip(ranked.rows, indices, strict=True)
        ]
        predictions: list[dict[str, Any]] = []
        if len(selection.control):
            control = EngineWork(loaded, pool_x[selection.control], num_samples, to_rank.seed, call)
            reservation.reserve(work_bytes(control), "pool")
            await context.engine.compute(control)
            predictions = control_predictions(manifest, control.predicted.prediction)
            answered += control_rows(selection.control.tolist(), ids, len(answered))
        if envelope.keep:
            numbers, seed = row_format(manifest), to_rank.seed
            acquired = Acquisition(*loaded.key, numbers, acquisition, seed, num_samples)
            stored_rows = acquired_rows(pool_x, answered, predictions)
            await context.threads.state(lambda: save_acquired(context.state, acquired, stored_rows))
            row_counts = {"acquired_rows": len(stored_rows), "control_rows": len(selection.control)}
            context.metrics.count(loaded.key, **row_counts)
        call.record.add_phases(to_rank.phases)
    draws = 0 if acquisition == RANDOM else num_samples
    context.metrics.count(loaded.key, pool_rows=pool_size, draws=draws)
    call.record.set_usage(loaded.name, loaded.version, pool_size, draws)
    has_labels = not has_ids or not envelope.exclude_labelled or settings.state is not None
    excluded = selection.excluded if has_labels else None
    computation = ComputationRequest(
        model=loaded.name,
        version=loaded.version,
        num_samples=num_samples,
        seed=to_rank.seed,
        **fields,
    )
    counts = pool_size, excluded, unknown, envelope.race, ranked.finalists
    return json_response(acquire_answer(manifest, computation, answered, *counts))


class RowNumbers(Sequence[str]):
    """Row numbers as ids, converted to strings on demand.

    A list of strings would take long to free.
    """

    def __init__(self, rows: int) -> None:
        self._numbers = range(rows)

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: Any) -> Any:
        return str(self._numbers[index])


def _add_pool_index(error: InvalidInput, places: Int64[np.ndarray, "R"]) -> InvalidInput:
    row = error.field.removeprefix("pool.")
    return error.rename_fields(lambda _: f"pool.{places[int(row)]}") if row.isdigit() else error


async def find_names(context: Context, work: RowWork[Any]) -> list[str] | None:
    """Return the row ids from the request or its file, or None if there are none."""
    call, rows = work.call, len(work.rows)

    def find() -> list[str] | None:
        names = work.envelope.ids
        if names is None and isinstance(work.rows, RowFile):
            names = work.rows.ids()
        if names is None:
            return None
        with call.reservation.hold(CHECK_BYTES * rows, "ids"):
            check_ids(names, rows)
        return list(names)

    return await context.threads.requests.run(call, ID_BYTES * rows, find)


def select_rows(
    context: Context,
    envelope: AcquireRequest,
    model: str,
    ids: Sequence[str],
    has_ids: bool,
    seed: int,
) -> Selection:
    """Select the rows to rank and the control rows."""
    check_keep(envelope.keep, envelope.control, ids)
    excludes_labelled = has_ids and envelope.exclude_labelled
    labelled = context.find_labelled_ids(model, ids) if excludes_labelled else set[str]()
    return select(ids, labelled, envelope.control, envelope.k, seed)
