"""`POST /predict`, and `predict`, which the routes of all protocols call.

A route parses its request into `PredictWork` and passes an `Encoder` for the response. `predict`
handles admission, memory limits, batching, decisions, drift and metrics.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic, TypeVar

import numpy as np
from fastapi import APIRouter, Request, Response
from jaxtyping import Bool, Float64, Int64

from model_store.artifacts.manifest import InputSpec
from model_store.inference.explanation import explain, replace_each_column
from model_store.inference.prediction import DecisionOptions, Prediction, check_computed, decide
from model_store.sources.columns import UnusualCells, fill_missing, unknown_categories
from model_store.sources.row_file import RowFile
from model_store.types import Pause
from service.api.explanations import ExplainedRows, explanation_bytes
from service.api.media_types import JSON
from service.api.openapi import BINARY, ERRORS, PURPOSE_PARAMETER, answers, request_body
from service.api.options import (
    check_answer_size,
    decision_options,
    resolve_groups,
    resolve_num_samples,
)
from service.api.pool_files import open_rows_file
from service.api.predictions import PredictAnswer, Results
from service.api.requests import (
    NPZ,
    check_row_count,
    find_unusual_cells,
    is_test,
    negotiate_media_type,
    read_body,
    read_rows,
    to_numbers,
)
from service.api.responses import (
    NUMBERS_AT_ONCE,
    Answer,
    answer_bytes,
    predict_json,
    predict_npz,
    response,
)
from service.api.rows import Rows
from service.api.schemas import Envelope, PredictRequest
from service.auth.scopes import SCOPES_KEY, needs
from service.context import Context, get_context
from service.engine.batching import BATCH_ROW_DRAWS, EngineWork, Predicted, work_bytes
from service.models.models import ServedModel
from service.request_context import RequestContext

AnyEnvelope = TypeVar("AnyEnvelope", bound=Envelope)
Groups = Int64[np.ndarray, "N"] | None
Encoder = Callable[[Answer, Pause], list[bytes]]

INPUTS = "inputs"  # name of the rows in errors
BODY = request_body(PredictRequest)
FEW_NUMBERS = 2_500  # encoded on the event loop in less than a millisecond

router = APIRouter(tags=["Predict"])


@dataclass(eq=False)
class RowWork(Generic[AnyEnvelope]):
    """A parsed request. `rows` is cleared after the conversion to numbers, to save memory."""

    call: RequestContext
    envelope: AnyEnvelope
    loaded: ServedModel
    rows: Rows | RowFile
    field: str = INPUTS  # name of the rows in errors
    is_live: bool = True  # counted in drift and metrics


PredictWork = RowWork[PredictRequest]


@dataclass(frozen=True, eq=False)
class ExplanationInputs:
    cells: list[UnusualCells] | None
    replaced: Prediction | None
    has_scope: bool  # the request's key can see training rows


@dataclass(frozen=True, eq=False)
class RowChanges:
    """Inputs of a request that change the decisions about its rows."""

    groups: Groups = None
    missing: Bool[np.ndarray, "N C"] | None = None
    to_explain: ExplanationInputs | None = None

    def __bool__(self) -> bool:
        return any(value is not None for value in vars(self).values())


@router.post(
    "/predict",
    responses=answers(PredictAnswer, *ERRORS, content={NPZ: {"schema": BINARY}}),
    openapi_extra={**BODY, "parameters": [*BODY["parameters"], PURPOSE_PARAMETER]},
    dependencies=[needs("predict")],
)
async def post_predict(request: Request) -> Response:
    """Predict labels or targets with uncertainty, and flag unusual rows."""
    context = get_context(request)
    call = context.begin(request, has_rows=True)
    media_type = negotiate_media_type(request, JSON, NPZ)
    work = await read_work(context, call, PredictRequest, INPUTS, context.settings.max_rows)
    encode, as_arrays = (predict_npz, True) if media_type == NPZ else (predict_json, False)
    return response(await predict(context, work, encode, as_arrays), media_type)


async def read_work(
    context: Context, call: RequestContext, kind: type[AnyEnvelope], field: str, max_rows: int
) -> RowWork[AnyEnvelope]:
    """Parse the envelope and rows of a request, and find its model."""
    body = await read_body(call, context.settings.max_body_bytes)
    envelope, inline = await read_rows(context, call, body, kind, field, max_rows)
    loaded = await context.find_model(call, envelope)
    if inline is not None:
        return RowWork(call, envelope, loaded, inline, field)
    file = await open_rows_file(context, call, body, envelope, loaded, field)
    jobs = f"{call.request.scope['path']}/jobs"
    check_row_count(file.field, len(file), max_rows, f" ({jobs} takes more)")
    return RowWork(call, envelope, loaded, file, field)


async def predict(
    context: Context, work: PredictWork, encode: Encoder, as_arrays: bool = False
) -> list[bytes]:
    """Predict rows and return the encoded response in parts.

    `as_arrays` is True if the encoder writes arrays, which need less memory than JSON.
    """
    settings, call, envelope, loaded = context.settings, work.call, work.envelope, work.loaded
    model, reservation, num_rows = loaded.model, call.reservation, len(work.rows)
    manifest = model.manifest
    num_samples = resolve_num_samples(envelope, loaded, settings)
    options = decision_options(envelope, loaded, num_samples)
    groups = resolve_groups(envelope, num_rows, loaded)
    check_answer_size(envelope, num_rows, num_samples, loaded)
    extra = count_extra_rows(manifest.input) if envelope.explain else 0
    all_rows, encoding = num_rows * (1 + extra), model.encoding_draws
    with context.admission.admit(
        all_rows, num_samples, BATCH_ROW_DRAWS, call.client, encoding, call.length
    ):
        is_counted = work.is_live and not is_test(call.request)
        rows, work.rows, cells = work.rows, [], None
        x = await to_numbers(context, call, rows, loaded, work.field, envelope)
        columns = manifest.input.columns
        missing = fill_missing(x, columns) if columns else None
        if envelope.explain and manifest.input.columns and not isinstance(rows, RowFile):
            cells = await find_unusual_cells(context, call, rows, loaded)
        del rows
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
        to_explain = None
        if envelope.explain:
            replaced = await _predict_usual_rows(context, computed) if extra else None
            has_scope = "rows" in call.request.scope[SCOPES_KEY]
            to_explain = ExplanationInputs(cells, replaced, has_scope)
        changes = RowChanges(groups, missing, to_explain)
        write = partial(_write, context, computed, options, changes, encode, is_counted, work.field)
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
    """Estimate the size of the response in numbers, without samples and explanations."""
    return len(work.x) * (20 + 2 * work.served_model.model.manifest.output_size)


def count_extra_rows(spec: InputSpec) -> int:
    """Return the number of extra rows that an explanation computes for each row."""
    return 1 + len(spec.columns) if spec.columns else 0


async def _predict_usual_rows(context: Context, work: EngineWork) -> Prediction:
    columns = work.served_model.model.manifest.input.columns
    make = partial(replace_each_column, columns, work.x, work.context.pause)
    x = await context.threads.requests.run(work.context, work.x.nbytes, make)
    usual_work = EngineWork(
        work.served_model, x, work.num_samples, work.draw_seed, work.context, priors=work.priors
    )
    await context.engine.compute(usual_work)
    return usual_work.predicted.prediction


def _write(
    context: Context,
    work: EngineWork,
    options: DecisionOptions,
    changes: RowChanges,
    encode: Encoder,
    is_counted: bool,
    field: str,
) -> tuple[list[bytes], int]:
    """Encode the response in parts, and return them with the number of flags.

    Counted requests update the metrics and, unless they have a seed, the drift test.
    """
    loaded, predicted, seed = work.served_model, work.predicted, work.draw_seed
    scores = predicted.batch.prediction.scores
    overall: Float64[np.ndarray, "N"] = getattr(scores, scores.overall)[predicted.rows]
    check_computed(overall, field)
    results, rows = _decide(work, predicted, options, changes)
    columns = loaded.model.manifest.input.columns
    unknown = unknown_categories(work.x, columns) if columns else {}
    answer = Answer(results, rows, seed, options, unknown)
    num_flags = int(np.count_nonzero(answer.flags))
    parts = encode(answer, work.context.pause)
    if is_counted and work.seed is None:
        loaded.watch(predicted.batch.prediction, predicted.rows, work.x)
    if is_counted:
        context.metrics.count_prediction(
            loaded.key, scores.overall, overall, work.num_samples, num_flags
        )
    return parts, num_flags


def _decide(
    work: EngineWork,
    predicted: Predicted,
    options: DecisionOptions,
    changes: RowChanges,
) -> tuple[Results, slice]:
    """Return the results and the request's slice of them.

    Small requests with the same options share the results of their micro-batch. With `fdr` they
    cannot, because decisions then depend on the other rows.
    """
    model = work.served_model.model

    def results(prediction: Prediction, explained: ExplainedRows | None = None) -> Results:
        decision, samples = decide(prediction, options), predicted.samples
        return Results(model.manifest, work.num_samples, prediction, decision, samples, explained)

    is_small = _answer_numbers(work) <= NUMBERS_AT_ONCE
    is_plain = predicted.samples is None and not changes
    if is_small and is_plain and options.fdr is None:
        batch_results = predicted.batch.share(options, results)
        if batch_results is not None:
            return batch_results, predicted.rows
    prediction, explained = replace(predicted.prediction, missing=changes.missing), None
    if changes.groups is not None:
        prediction = prediction.with_groups(changes.groups)
    if (to_explain := changes.to_explain) is not None:
        replaced, has_scope = to_explain.replaced, to_explain.has_scope
        explanation = explain(model, prediction, work.x, replaced, work.context.pause, has_scope)
        explained = ExplainedRows(model.manifest, explanation, to_explain.cells, has_scope)
    return results(prediction, explained), slice(None)
