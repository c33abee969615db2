"""`POST /predict` and the `predict` function that all protocols use.

A route parses its request into `PredictWork` and passes an `Encoder` for the response. `predict`
handles admission, memory limits, batching, decisions, drift and metrics.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, Generic

import numpy as np
from fastapi import APIRouter, Request, Response
from jaxtyping import Bool, Float32, Float64, Int64

from model_store.artifacts.manifest import InputSpec
from model_store.inference.explanation import explain, replace_each_column
from model_store.inference.prediction import DecisionOptions, Prediction, check_computed, decide
from model_store.sources.columns import (
    UnusualCells,
    check_complete,
    fill_missing,
    unknown_categories,
    unusual_cells,
)
from model_store.sources.row_file import RowFile
from model_store.types import Pause
from service.api.explanations import ExplainedRows, explanation_bytes
from service.api.json_blocks import JsonRows
from service.api.media_types import JSON
from service.api.openapi import BINARY, PURPOSE_PARAMETER, request_body
from service.api.options import (
    check_answer_size,
    decision_options,
    resolve_groups,
    resolve_num_samples,
)
from service.api.pool_files import open_rows_file
from service.api.predictions import PredictAnswer, Results
from service.api.requests import (
    ENDINGS,
    FILE_ENDINGS,
    NPZ,
    AnyEnvelope,
    check_row_count,
    is_test,
    negotiate_media_type,
    read_body,
    read_rows,
)
from service.api.responses import (
    NUMBERS_AT_ONCE,
    Answer,
    answer_bytes,
    predict_json,
    predict_npz,
    response,
)
from service.api.rows import MAX_FAST_BYTES, Cells, Rows, file_array, rows_array
from service.api.schemas import PredictRequest
from service.auth.scopes import SCOPES_KEY, needs
from service.context import Context, get_context
from service.engine.batching import BATCH_ROW_DRAWS, EngineWork, Predicted, work_bytes
from service.engine.threads import SLICE_BYTES
from service.models.models import ServedModel
from service.request_context import RequestContext

Groups = Int64[np.ndarray, "N"] | None
Encoder = Callable[[Answer, Pause], list[bytes]]

BODY = request_body(PredictRequest)
FEW_NUMBERS = 2_500  # encoded on the event loop in less than a millisecond

router = APIRouter(tags=["Predict"])


@dataclass(eq=False)
class RowWork(Generic[AnyEnvelope]):
    """A parsed request.

    To save memory, `rows` is cleared once it is converted to numbers.
    """

    call: RequestContext
    envelope: AnyEnvelope
    loaded: ServedModel
    rows: Rows | RowFile
    field: str = "inputs"  # name of the rows in errors
    is_live: bool = True  # counted in drift and metrics


PredictWork = RowWork[PredictRequest]


@dataclass(frozen=True, eq=False)
class RowChanges:
    """The inputs of a request that affect the decisions about its rows."""

    groups: Groups = None
    missing: Bool[np.ndarray, "N C"] | None = None
    explain: Callable[[Prediction], ExplainedRows] | None = None

    def __bool__(self) -> bool:
        return any(value is not None for value in vars(self).values())


@router.post(
    "/predict",
    response_model=PredictAnswer,
    responses={200: {"content": {NPZ: {"schema": BINARY}}}},
    openapi_extra={**BODY, "parameters": [*BODY["parameters"], PURPOSE_PARAMETER]},
    dependencies=[needs("predict")],
)
async def post_predict(request: Request) -> Response:
    """Predict labels or targets with uncertainty and flag unusual rows."""
    context = get_context(request)
    call = context.begin(request, has_rows=True)
    media_type = negotiate_media_type(request, JSON, NPZ)
    work = await read_work(context, call, PredictRequest, "inputs", context.settings.max_rows)
    encode, as_arrays = (predict_npz, True) if media_type == NPZ else (predict_json, False)
    return response(await predict(context, work, encode, as_arrays), media_type)


async def read_work(
    context: Context,
    call: RequestContext,
    kind: type[AnyEnvelope],
    field: str,
    max_rows: int,
    is_job: bool = False,
) -> RowWork[AnyEnvelope]:
    """Parse a request's envelope and rows, and find its model.

    An npy body or a file holds only rows, so the other fields are query parameters. A form has one
    part per row, and the other fields in further parts or the query. The deadline of a job
    excludes the upload.

    Raises:
        Unsupported: if the media type is unknown.
        InvalidInput: if a field is invalid.
        TooLarge: if there are more than `max_rows` rows, except in a job's file.
    """
    settings = context.settings
    body = await read_body(call, settings.max_body_bytes)
    if is_job:
        call.started = time.monotonic()
        call.deadline = call.started + settings.deadline_s
    endings = ENDINGS if is_job else FILE_ENDINGS
    envelope, inline = await read_rows(context, call, body, kind, field, max_rows, endings)
    loaded = await context.find_model(call, envelope)
    if inline is not None:
        return RowWork(call, envelope, loaded, inline, field)
    file = await open_rows_file(context, call, body, envelope, loaded, field)
    if not is_job:
        jobs = f"{call.request.scope['path']}/jobs"
        check_row_count(file.field, len(file), max_rows, f" ({jobs} takes more)")
    return RowWork(call, envelope, loaded, file, field)


async def to_numbers(context: Context, work: RowWork[Any]) -> Float32[np.ndarray, "N I"]:
    """Convert a request's rows to numbers, using a worker thread if this is slow.

    Missing cells are NaN, or an error if the request rejects them.
    """
    call, rows, field, model = work.call, work.rows, work.field, work.loaded.model
    size, encoder, spec = 4 * len(rows) * model.row_size, model.text_encoder, model.manifest.input
    if isinstance(rows, RowFile):
        call.reservation.reserve(size, rows.field)
        convert, is_slow = partial(file_array, rows, call, encoder), True
    else:
        call.reservation.reserve(size, field)
        encoded = spec.encoded if work.envelope.encoded else spec
        convert = partial(rows_array, rows, encoded, field, call, encoder)
        is_slow = isinstance(rows, JsonRows | Cells) or (
            isinstance(rows, list) and isinstance(rows[0], str | bytes | dict)
        )
    is_slow = is_slow or size > MAX_FAST_BYTES
    x = await context.threads.requests.run(call, size, convert) if is_slow else convert()
    if work.envelope.missing == "reject":
        check_complete(x, spec.columns, field)
    return x


async def find_unusual_cells(context: Context, work: RowWork[Any]) -> list[UnusualCells] | None:
    """Find each row's unknown categories and missing values.

    Returns None unless all rows are objects.
    """
    rows, columns = work.rows, work.loaded.model.manifest.input.columns
    if isinstance(rows, RowFile):
        return None

    def find() -> list[UnusualCells] | None:
        results = []
        blocks: Iterable[Any] = rows.parse_blocks() if isinstance(rows, JsonRows) else [rows]
        for row in chain.from_iterable(blocks):
            if not isinstance(row, dict):
                return None
            results.append(unusual_cells(row, columns))
            work.call.pause()
        return results

    return await context.threads.requests.run(work.call, SLICE_BYTES, find)


async def predict(
    context: Context, work: PredictWork, encode: Encoder, as_arrays: bool = False
) -> list[bytes]:
    """Predict rows and return the encoded response in parts.

    `as_arrays` is True if the encoder writes arrays, which need less memory than JSON.
    """
    call, envelope, loaded, model = work.call, work.envelope, work.loaded, work.loaded.model
    reservation, manifest, num_rows = call.reservation, model.manifest, len(work.rows)
    num_samples = resolve_num_samples(envelope, model, context.settings)
    options = decision_options(envelope, model, num_samples)
    groups = resolve_groups(envelope, num_rows, model)
    check_answer_size(envelope, num_rows, num_samples, model)
    extra = count_extra_rows(manifest.input) if envelope.explain else 0
    all_rows, encoding = num_rows * (1 + extra), model.encoding_draws
    with context.admission.admit(
        all_rows, num_samples, BATCH_ROW_DRAWS, call.client, encoding, call.length
    ):
        work.is_live = work.is_live and not is_test(call.request)
        x = await to_numbers(context, work)
        columns = manifest.input.columns
        missing = fill_missing(x, columns) if columns else None
        cells = await find_unusual_cells(context, work) if extra else None
        work.rows = []
        keep, priors = envelope.return_samples, options.priors
        computed = EngineWork(loaded, x, num_samples, envelope.seed, call, keep, priors=priors)
        size = answer_bytes(manifest, num_rows, num_samples if keep else 0, as_arrays)
        size += work_bytes(computed)
        reservation.shrink(x.nbytes)
        reservation.reserve(size, "answer")
        if envelope.explain:
            size = explanation_bytes(manifest, num_rows, as_arrays) + extra * x.nbytes
            reservation.reserve(size + work_bytes(computed, extra * num_rows), "explain")
        await context.engine.compute(computed)
        explanation = None
        if envelope.explain:
            replaced = await _predict_usual_rows(context, computed) if extra else None
            has_scope = "rows" in call.request.scope[SCOPES_KEY]
            explanation = partial(_explain, computed, replaced, cells, has_scope)
        changes = RowChanges(groups, missing, explanation)
        write = partial(_write, context, work, computed, options, changes, encode)
        is_plain = not keep and not envelope.explain
        if is_plain and _answer_numbers(computed) <= FEW_NUMBERS:
            parts, flags = write()
        else:
            parts, flags = await context.threads.answers.run(call, reservation.used_bytes, write)
    call.record.add_phases(computed.phases)
    call.record.set_usage(loaded.name, loaded.version, num_rows, num_samples, flags)
    del x, computed, write  # before the client reads the response slowly
    reservation.shrink(sum(map(len, parts)))
    return parts


def _answer_numbers(work: EngineWork) -> int:
    """Estimate how many numbers the response has, excluding samples and explanations."""
    return len(work.x) * (20 + 2 * work.served_model.model.manifest.output_size)


def count_extra_rows(spec: InputSpec) -> int:
    """Return the number of extra rows to predict when explaining a row."""
    return 1 + len(spec.columns) if spec.columns else 0


async def _predict_usual_rows(context: Context, work: EngineWork) -> Prediction:
    columns = work.served_model.model.manifest.input.columns
    make = partial(replace_each_column, columns, work.x, work.context.pause)
    x = await context.threads.requests.run(work.context, work.x.nbytes, make)
    usual_work = replace(work, x=x, seed=work.draw_seed, keep_samples=False)
    await context.engine.compute(usual_work)
    return usual_work.predicted.prediction


def _explain(
    work: EngineWork,
    replaced: Prediction | None,
    cells: list[UnusualCells] | None,
    has_scope: bool,
    prediction: Prediction,
) -> ExplainedRows:
    model, pause = work.model, work.context.pause
    explanation = explain(model, prediction, work.x, replaced, pause, has_scope)
    return ExplainedRows(model.manifest, explanation, cells, has_scope)


def _write(
    context: Context,
    row_work: PredictWork,
    work: EngineWork,
    options: DecisionOptions,
    changes: RowChanges,
    encode: Encoder,
) -> tuple[list[bytes], int]:
    """Encode the response in parts and return them with the number of flagged rows.

    Live requests update the metrics and, unless they have a seed, the drift test.
    """
    loaded, predicted, seed = work.served_model, work.predicted, work.draw_seed
    scores = predicted.batch.prediction.scores
    overall: Float64[np.ndarray, "N"] = getattr(scores, scores.overall)[predicted.rows]
    check_computed(overall, row_work.field)
    results, rows = _decide(work, predicted, options, changes)
    columns = loaded.model.manifest.input.columns
    unknown = unknown_categories(work.x, columns) if columns else {}
    answer = Answer(results, rows, seed, options, unknown)
    num_flags = int(np.count_nonzero(answer.flags))
    parts = encode(answer, work.context.pause)
    if row_work.is_live:
        if work.seed is None:
            loaded.watch(predicted.batch.prediction, predicted.rows, work.x)
        context.metrics.count_prediction(
            loaded.key, scores.overall, overall, work.num_samples, num_flags
        )
    return parts, num_flags


def _decide(
    work: EngineWork, predicted: Predicted, options: DecisionOptions, changes: RowChanges
) -> tuple[Results, slice]:
    """Compute the results and return them with this request's slice.

    Small requests with the same options share the results of their micro-batch. With `fdr` they
    cannot, because decisions then depend on the other rows.
    """

    def results(prediction: Prediction, explained: ExplainedRows | None = None) -> Results:
        decision, samples = decide(prediction, options), predicted.samples
        manifest = work.served_model.model.manifest
        return Results(manifest, work.num_samples, prediction, decision, samples, explained)

    is_small = _answer_numbers(work) <= NUMBERS_AT_ONCE
    is_plain = predicted.samples is None and not changes
    if is_small and is_plain and options.fdr is None:
        batch_results = predicted.batch.share(options, results)
        if batch_results is not None:
            return batch_results, predicted.rows
    prediction = replace(predicted.prediction, missing=changes.missing)
    if changes.groups is not None:
        prediction = prediction.with_groups(changes.groups)
    explained = None if changes.explain is None else changes.explain(prediction)
    return results(prediction, explained), slice(None)
