"""`POST /predict`: rows to labels or targets, how uncertain and why, and whether a row is unlike
the data.

Every protocol but Label Studio's predicts by `predict`: admission, the client's share, memory, the
deadline, the micro-batch, the decision, drift and metrics. A route reads a request, `ToPredict`,
and names the `Encoder` of its answer.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
from fastapi import APIRouter, Request, Response
from jaxtyping import Float64, Int64

from model_store.artifacts.manifest import InputSpec
from model_store.inference.explanation import explain, rows_as_usual
from model_store.inference.prediction import DecisionOptions, Prediction, check_computed, decide
from model_store.sources.columns import OddCells, unknown_categories, usual_row
from model_store.sources.row_file import RowFile
from model_store.types import Pause
from service.api.explanations import Explained, explanation_bytes
from service.api.media_types import JSON
from service.api.openapi import BINARY, ERRORS, PURPOSE_PARAMETER, answers, request_body
from service.api.options import (
    decision_options,
    groups_of,
    num_samples_of,
    refuse_large_answers,
)
from service.api.pool_files import open_rows_file
from service.api.predictions import PredictAnswer, Results
from service.api.requests import (
    NPZ,
    SMALL_JSON_BYTES,
    answer_type,
    count_rows,
    find_odd_cells,
    is_test,
    read_body,
    read_rows,
    refuse_none_or_many,
    row_numbers,
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
from service.api.schemas import PredictRequest
from service.auth.scopes import needs
from service.call import Call
from service.context import Context, context_of
from service.engine.batching import BATCH_ROW_DRAWS, kept_bytes
from service.engine.jobs import Job, Predicted
from service.models.models import Served

T = TypeVar("T")
Groups = Int64[np.ndarray, "N"] | None
Encoder = Callable[[Answer, Pause], list[bytes]]

INPUTS = "inputs"  # the field that errors name rows by
BODY = request_body(PredictRequest)
FEW_NUMBERS = 2_500  # of an answer that is written at once: less than a millisecond

router = APIRouter(tags=["Predict"])


@dataclass(eq=False)
class ToPredict:
    """A request to predict rows, as it was read. `rows` are let go of once they are numbers."""

    call: Call
    envelope: PredictRequest
    served: Served
    rows: Rows | RowFile | None

    @property
    def num_rows(self) -> int:
        assert self.rows is not None
        return count_rows(self.rows)


@dataclass(frozen=True, eq=False)
class ToExplain:
    cells: list[OddCells] | None
    as_usual: Prediction | None


@router.post(
    "/predict",
    responses=answers(PredictAnswer, *ERRORS, content={NPZ: {"schema": BINARY}}),
    openapi_extra={**BODY, "parameters": [*BODY["parameters"], PURPOSE_PARAMETER]},
    dependencies=[needs("predict")],
)
async def post_predict(request: Request) -> Response:
    """Predict rows: label or target, how uncertain and why, and whether a row is unlike the
    data."""
    context = context_of(request)
    settings, call = context.settings, context.begin(request, has_rows=True)
    media_type = answer_type(request, JSON, NPZ)
    body = await read_body(call, settings.max_body_bytes)
    most = settings.max_rows
    envelope, rows = await read_rows(context, call, body, PredictRequest, INPUTS, most)
    asked = ToPredict(call, envelope, await context.find_model(call, envelope), rows)
    if rows is None:
        asked.rows = await open_rows_file(context, call, body, envelope, asked.served, INPUTS)
        refuse_none_or_many(INPUTS, asked.num_rows, most, " (/predict/jobs takes more)")
    del body, rows  # which may be many times as large as the numbers
    encode, as_arrays = (predict_npz, True) if media_type == NPZ else (predict_json, False)
    parts = await predict(context, asked, encode, as_arrays)
    return response(parts, media_type)


async def run_reading(context: Context, call: Call, size: int, work: Callable[[], T]) -> T:
    """Return the result of work that reads `size` bytes: few at once, many off the event loop."""
    if size <= SMALL_JSON_BYTES:
        return work()
    return await context.threads.requests.run(call, size, work)


async def predict(
    context: Context, asked: ToPredict, encode: Encoder, as_arrays: bool = False
) -> list[bytes]:
    """Predict a request's rows and return the answer in parts; `as_arrays` takes less memory.

    Raises:
        InvalidInput, TooLarge, Overloaded, PastDeadline: with statuses as in `docs/problems.md`.
        ClientDisconnect: if the client hangs up.
    """
    settings, call, envelope, served = context.settings, asked.call, asked.envelope, asked.served
    manifest, reservation, num_rows = served.model.manifest, call.reservation, asked.num_rows
    num_samples = num_samples_of(envelope, served, settings)
    options = decision_options(envelope, served, num_samples)
    groups = groups_of(envelope, num_rows, served)
    refuse_large_answers(envelope, num_rows, num_samples, served)
    more = rows_to_explain(manifest.input) if envelope.explain else 0
    all_rows, encoding = num_rows * (1 + more), served.model.encoding_draws
    with context.admission.admitted(
        all_rows, num_samples, BATCH_ROW_DRAWS, call.client, encoding, call.length
    ):
        cells, counts = None, not is_test(call.request)
        assert asked.rows is not None
        x = await row_numbers(context, call, asked.rows, served, INPUTS, envelope.encoded)
        if envelope.explain and manifest.input.columns and not isinstance(asked.rows, RowFile):
            cells = await find_odd_cells(context, call, asked.rows, served)
        asked.rows = None  # which may be many times as large
        reservation.shrink(x.nbytes)
        keep, priors = envelope.return_samples, options.priors
        job = Job(served, x, num_samples, envelope.seed, call, keep, priors=priors)
        kept_draws = num_samples if keep else 0
        size = kept_bytes(job) + answer_bytes(manifest, len(x), kept_draws, as_arrays)
        reservation.reserve(size, "answer")
        if envelope.explain:
            size = explanation_bytes(manifest, len(x), as_arrays) + more * x.nbytes
            reservation.reserve(size + kept_bytes(job, more * len(x)), "explain")
        predicted = await context.engine.predict(job)
        to_explain = None
        if envelope.explain:
            as_usual = await _predict_as_usual(context, job, predicted) if more else None
            to_explain = ToExplain(cells, as_usual)
        write = partial(
            _write, context, job, predicted, options, groups, encode, to_explain, counts
        )
        is_plain = not keep and not envelope.explain
        if is_plain and _answer_numbers(job) <= FEW_NUMBERS:
            parts, flags = write()
        else:
            parts, flags = await context.threads.answers.run(call, reservation.held, write)
    call.record.add_phases(predicted.phases)
    call.record.add_usage(served.name, served.version, len(x), num_samples, flags)
    del x, job, predicted, write  # an answer may take long to be read
    reservation.shrink(sum(map(len, parts)))
    return parts


def _answer_numbers(job: Job) -> int:
    """Return about how many numbers the answer has, without samples and explanations."""
    return len(job.x) * (20 + 2 * job.served.model.manifest.output_size)


def rows_to_explain(spec: InputSpec) -> int:
    """Return how many more rows are predicted for each that is explained: itself, and once for each
    column."""
    return 1 + len(spec.columns) if spec.columns and usual_row(spec.columns) is not None else 0


async def _predict_as_usual(context: Context, job: Job, predicted: Predicted) -> Prediction:
    columns = job.served.model.manifest.input.columns
    work = partial(rows_as_usual, columns, job.x, job.call.pause)
    x = await context.threads.requests.run(job.call, job.x.nbytes, work)
    again = Job(job.served, x, job.num_samples, predicted.seed, job.call, priors=job.priors)
    return (await context.engine.predict(again)).prediction


def _write(
    context: Context,
    job: Job,
    predicted: Predicted,
    options: DecisionOptions,
    groups: Groups,
    encode: Encoder,
    to_explain: ToExplain | None,
    counts: bool,
) -> tuple[list[bytes], int]:
    """Return the answer in parts and how many rows are flagged, and note both where rows are
    watched and counted, unless the request is a test."""
    served, scores = job.served, predicted.batch.prediction.scores
    overall: Float64[np.ndarray, "N"] = scores.by_name()[scores.overall][predicted.rows]
    check_computed(overall, INPUTS)
    results, rows = _decide(job, predicted, options, groups, to_explain)
    columns = served.model.manifest.input.columns
    unknown = unknown_categories(job.x, columns) if columns else {}
    answer = Answer(results, rows, predicted.seed, options, unknown)
    num_flags = int(np.count_nonzero(answer.flags))
    parts = encode(answer, job.call.pause)
    if counts and job.seed is None:  # else a replay
        served.watch(predicted.batch.prediction, predicted.rows, job.x)
    if counts:
        context.metrics.count_prediction(
            served.key, scores.overall, overall, job.num_samples, num_flags
        )
    return parts, num_flags


def _decide(
    job: Job,
    predicted: Predicted,
    options: DecisionOptions,
    groups: Groups,
    to_explain: ToExplain | None,
) -> tuple[Results, slice]:
    """Return results, and which rows of them are the job's.

    Rows are decided one by one, but for `fdr`. So what is decided of a few rows may be that of
    their whole micro-batch, once for all of its requests that ask alike.
    """
    manifest = job.served.model.manifest

    def results(prediction: Prediction, explained: Explained | None = None) -> Results:
        decision, samples = decide(prediction, options), predicted.samples
        return Results(manifest, job.num_samples, prediction, decision, samples, explained)

    is_small = _answer_numbers(job) <= NUMBERS_AT_ONCE
    is_plain = predicted.samples is None and groups is None and to_explain is None
    if is_small and is_plain and options.fdr is None:
        whole = predicted.batch.shared(options, results)
        if whole is not None:
            return whole, predicted.rows
    prediction, explained = predicted.prediction, None
    if groups is not None:
        prediction = prediction.of_groups(groups)
    if to_explain is not None:
        as_usual, model = to_explain.as_usual, job.served.model
        why = explain(model, prediction, job.x, as_usual, job.call.pause)
        explained = Explained(manifest, why, to_explain.cells)
    return results(prediction, explained), slice(None)
