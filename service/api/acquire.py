"""`POST /acquire` and `POST /acquire/preview`: rank an unlabelled pool, and preview its file."""

import base64
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

import numpy as np
import orjson
from fastapi import APIRouter, Request, Response
from jaxtyping import Float32, Int64
from pydantic import BaseModel, Field

from model_store.acquisition.choice import RANDOM, Choice, Selection, select
from model_store.acquisition.ranking import rank_pool
from model_store.errors import InvalidInput
from model_store.inference.noise import fresh_seed
from model_store.sources.columns import fill_missing, unknown_categories
from model_store.sources.files import check_ids
from model_store.sources.row_file import Part, RowFile, text_bytes
from model_store.sources.rows import add_row_id, count_rows, name_rows
from model_store.state.labels import Acquisition, has_state, labelled_ids, row_format, save_acquired
from model_store.state.live import prediction_records
from model_store.types import JsonObject
from service.api.media_types import ENDINGS
from service.api.openapi import file_body, request_body
from service.api.options import resolve_num_samples
from service.api.predict import RowWork, open_file, read_work, to_numbers
from service.api.requests import parse_query, read_body, request_media_type, unsupported
from service.api.responses import json_response
from service.api.schemas import AcquireRequest, ModelRequest
from service.auth.scopes import needs
from service.batch.computation import acquire_answer, choice_options
from service.context import Context, CurrentContext, CurrentRequest, get_context
from service.engine.batching import EngineWork
from service.engine.pool_ranking import EnginePool, PoolWork, acquired_rows, answer_rows, check_keep

ID_BYTES = 200  # per id
CHECK_BYTES = 100  # per id, while duplicates are searched
MAX_CHARACTERS = 1000  # of a text in a preview
MAX_PREVIEW_BYTES = 64 << 20


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


class PreviewRequest(ModelRequest):
    """A request to preview rows of a file."""

    rows: Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True)] = Field(
        default=list(range(10)), max_length=1000
    )
    """indices of the rows to show; indices out of range are skipped"""


class PreviewRow(BaseModel):
    """A row of a file: an object, the start of a text, a base64 image file or numbers."""

    index: int
    id: str
    row: JsonObject | list[float] | str


class PreviewAnswer(BaseModel):
    """A preview of a file's rows, as the service reads them."""

    model: str
    version: str
    rows: int
    read_as: str
    ignored_columns: list[str]
    preview: list[PreviewRow]


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
    work = await read_work(context, call, AcquireRequest, "pool", settings.max_pool_rows)
    loaded, pool_size = work.loaded, len(work.rows)
    num_samples = resolve_num_samples(work.envelope, loaded.model, settings)
    choice = choice_options(work.envelope, loaded.model, num_samples)
    encoding = loaded.model.encoding_draws
    with context.admission.admit(pool_size, num_samples, call.client, encoding, call.length):
        x, names = await _read_pool(context, work)
        answer = await _rank(context, work, choice, x, names)
    draws = 0 if choice.acquisition == RANDOM else num_samples
    context.metrics.count(loaded.key, pool_rows=pool_size, draws=draws)
    call.record.set_usage(loaded.name, loaded.version, pool_size, draws)
    return json_response(answer)


async def _read_pool(
    context: Context, work: RowWork[AcquireRequest]
) -> tuple[Float32[np.ndarray, "N I"], list[str] | None]:
    call = work.call
    names = None if work.envelope.ids is None else await find_names(context, work, [])
    try:
        x = await to_numbers(context, work)
        fill_missing(x, work.loaded.model.manifest.input.columns)
    except InvalidInput as error:
        ids = await find_names(context, work, []) if isinstance(work.rows, RowFile) else None
        raise add_row_id(error, ids) from None
    names = names or await find_names(context, work, [x])
    work.rows = []
    call.reservation.shrink(x.nbytes)
    call.reservation.reserve(ID_BYTES * len(x) + text_bytes(names or ()), "ids")
    return x, names


async def _rank(
    context: Context,
    work: RowWork[AcquireRequest],
    choice: Choice,
    x: Float32[np.ndarray, "N I"],
    names: list[str] | None,
) -> JsonObject:
    call, envelope, loaded = work.call, work.envelope, work.loaded
    reservation, manifest = call.reservation, loaded.model.manifest
    acquisition, num_samples = choice.acquisition, choice.num_samples
    seed = fresh_seed() if envelope.seed is None and envelope.control else envelope.seed
    find = partial(select_rows, context, envelope, loaded.name, names, len(x), seed or 0)
    ids, selection = await context.threads.state(find)
    ranked_x, ranked_ids = x, ids
    if len(selection.ranked) < len(x):
        reservation.reserve(x.nbytes, "pool")
        copy = partial(np.take, x, selection.ranked, axis=0)
        ranked_x = await context.threads.requests.run(call, x.nbytes, copy)
        ranked_ids = [ids[i] for i in selection.ranked.tolist()]
    priors = choice.priors
    scored = PoolWork(
        loaded, ranked_x, num_samples, seed, call, acquisition=acquisition, priors=priors
    )
    choice = replace(choice, k=choice.k - len(selection.control))
    pool = EnginePool(context.engine, context.threads.answers, scored, ranked_ids, choice)
    try:
        ranked = await rank_pool(pool, choice)
    except InvalidInput as error:
        raise _add_pool_index(error, selection.ranked) from None
    columns = manifest.input.columns
    unknown = {} if acquisition == RANDOM else unknown_categories(ranked_x, columns)
    rows = answer_rows(ranked, selection, ids)
    predictions: list[JsonObject] = []
    if len(selection.control):
        control = EngineWork(loaded, x[selection.control], num_samples, pool.seed, call)
        reservation.reserve(control.memory_bytes(), "pool")
        await context.engine.compute(control)
        predictions = prediction_records(control.predicted.prediction, manifest.classes)
    if envelope.keep:
        model_fields = *loaded.key, row_format(manifest)
        acquired = Acquisition(*model_fields, acquisition, pool.seed, num_samples)
        stored_rows = acquired_rows(x, rows, predictions)
        await context.threads.state(lambda: save_acquired(context.state, acquired, stored_rows))
        row_counts = {"acquired_rows": len(stored_rows), "control_rows": len(selection.control)}
        context.metrics.count(loaded.key, **row_counts)
    call.record.add_phases(pool.phases)
    knows_labels = context.settings.state is not None or names is None
    excluded = selection.excluded if knows_labels or not envelope.exclude_labelled else None
    counts = len(x), excluded, unknown, ranked.finalists
    return acquire_answer(manifest, choice, pool.seed, rows, *counts)


def _add_pool_index(error: InvalidInput, places: Int64[np.ndarray, "R"]) -> InvalidInput:
    row = error.field.removeprefix("pool.")
    return error.rename_fields(lambda _: f"pool.{places[int(row)]}") if row.isdigit() else error


async def find_names(
    context: Context, work: RowWork[Any], blocks: Iterable[Float32[np.ndarray, "n I"]]
) -> list[str] | None:
    """Return row ids, if any. With `keep`, rows without ids are named by their content."""
    call, rows, columns = work.call, len(work.rows), work.loaded.model.manifest.input.columns

    def find() -> list[str] | None:
        names = work.envelope.ids
        if names is None and isinstance(work.rows, RowFile):
            names = work.rows.ids()
        if names is None:
            keep = getattr(work.envelope, "keep", False)
            return name_rows(blocks, columns, call.pause) if keep else None
        with call.reservation.hold(CHECK_BYTES * rows, "ids"):
            check_ids(names, rows)
        return list(names)

    return await context.threads.requests.run(call, ID_BYTES * rows, find)


def select_rows(
    context: Context,
    envelope: AcquireRequest,
    model: str,
    names: list[str] | None,
    rows: int,
    seed: int,
) -> tuple[list[str], Selection]:
    """Select the rows to rank and the control rows.

    Return the ids, which are row numbers by default, and the selection. This reads the state, so
    call it from a worker thread.
    """
    ids, labelled = list(map(str, range(rows))) if names is None else names, set[str]()
    check_keep(envelope.keep, envelope.control, ids)
    if names is not None and envelope.exclude_labelled and has_state(context.settings.state):
        labelled = labelled_ids(context.state, model, ids)
    return ids, select(ids, labelled, envelope.control, envelope.k, seed)


@router.post(
    "/acquire/preview",
    response_model=PreviewAnswer,
    openapi_extra=file_body(PreviewRequest, ENDINGS),
    dependencies=[needs("acquire")],
)
async def post_preview(request: Request, context: CurrentContext, call: CurrentRequest) -> Response:
    """Preview rows of a file, as the service reads them."""
    body = await read_body(call, context.settings.max_body_bytes)
    ending = ENDINGS.get(request_media_type(request))
    if ending is None:
        raise unsupported(request, f"one of {', '.join(ENDINGS)}")
    query = parse_query(request, PreviewRequest)
    loaded = await context.find_model(call, query)
    pool = await open_file(context, call, body, loaded, "pool", ending)
    work = partial(preview_rows, pool, query.rows)
    preview = await context.threads.requests.run(call, len(body), work)
    answer = {
        "model": loaded.name,
        "version": loaded.version,
        "rows": pool.rows,
        "read_as": pool.read_as,
        "ignored_columns": pool.ignored,
        "preview": preview,
    }
    return json_response(answer)


def preview_rows(pool: RowFile, rows: list[int]) -> list[JsonObject]:
    """Return the requested rows that exist, up to `MAX_PREVIEW_BYTES` of JSON."""
    ids = pool.ids()
    values: dict[int, Any] = {}
    first, last, remaining_bytes = 0, max(rows, default=-1), MAX_PREVIEW_BYTES
    for part in pool.parts() if rows else ():
        end = first + count_rows(part)
        for row in sorted({row for row in rows if first <= row < end}):
            value = _as_json(part, row - first, pool.spec.text is not None)
            size = len(orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY))
            remaining_bytes -= size
            if remaining_bytes < 0:
                break
            pool.bounds.reserve(2 * size, "rows")
            values[row] = value
        first = end
        pool.bounds.pause()
        if first > last or remaining_bytes < 0:
            break
    return [
        {"index": row, "id": str(row) if ids is None else ids[row], "row": values[row]}
        for row in rows
        if row in values
    ]


def _as_json(part: Part, row: int, is_text: bool) -> Any:
    if isinstance(part, dict):
        return {name: _plain(values[row]) for name, values in part.items()}
    value = part[row]
    if isinstance(value, np.ndarray):
        with np.errstate(over="ignore"):
            return value.ravel().astype(np.float32)
    if isinstance(value, bytes) and not is_text:
        return base64.b64encode(value).decode()
    text = value.decode("utf-8-sig", "replace") if isinstance(value, bytes) else str(value)
    return text[:MAX_CHARACTERS]


def _plain(cell: Any) -> Any:
    if isinstance(cell, float | np.floating):
        return float(cell) if np.isfinite(cell) else None
    return cell if isinstance(cell, int | str | None) else str(cell)
