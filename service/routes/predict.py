"""`POST /predict`: rows to labels or targets, how uncertain and why, and whether a row is unlike the data."""

import time
from functools import partial
from typing import Any

import numpy as np
from fastapi import APIRouter, Request, Response
from jaxtyping import Bool, Float64, Int64

from model_store.inference.explanation import explain
from model_store.inference.prediction import Prediction, check_computed
from model_store.inputs.columns import OddCells
from model_store.types import Steps, at_once
from service.context import Context, context_of
from service.engine.batching import BATCH_ROW_DRAWS, kept_bytes
from service.engine.decision import Decision, DecisionOptions, decide
from service.engine.explaining import more_rows, predicted_as_usual
from service.engine.jobs import Job, Predicted
from service.http.explanations import Explained, explanation_bytes
from service.http.openapi import ERRORS, request_body
from service.http.options import (
    decision_options,
    groups_of,
    num_samples_of,
    refuse_too_many_explained,
    refuse_too_many_samples,
)
from service.http.requests import JSON, NPZ, header, hung_up, read_body
from service.http.responses import (
    NUMBERS_AT_ONCE,
    answer_bytes,
    json_rows,
    numbers_a_row,
    predict_json,
    predict_json_parts,
    predict_npz,
    response,
    with_samples,
)
from service.http.schemas import PredictAnswer, PredictRequest
from service.observability.records import record_of
from service.process.budget import lease_of

router = APIRouter()


@router.post(
    "/predict",
    responses={200: {"model": PredictAnswer, "content": {NPZ: {}}}, **ERRORS},
    openapi_extra=request_body(PredictRequest, "inputs"),
)
async def post_predict(request: Request) -> Response:
    """Predict rows: label or target, how uncertain and why, and whether a row is unlike the data."""
    context = context_of(request)
    settings = context.settings
    client = context.client(request)
    context.admission.refuse_overload(1, client)  # before there is work on it
    begun = time.monotonic()
    body = await read_body(request, settings.max_body_bytes, settings.max_json_bytes)
    envelope, rows = await context.read(request, client, body, PredictRequest, "inputs", settings.max_rows)
    served = await context.served(envelope)
    num_samples = num_samples_of(envelope, served, settings)
    options = decision_options(envelope, served, num_samples, settings.settle)
    groups = groups_of(envelope, len(rows), served)
    refuse_too_many_samples(envelope, len(rows), num_samples, served, settings.max_answer_numbers)
    refuse_too_many_explained(envelope, len(rows), served, settings)
    as_arrays = NPZ in header(request, b"accept")
    more = more_rows(served.model.manifest.input) if envelope.explain else 0
    encoding = served.model.encoding_draws
    with context.admission.admitted(len(rows) * (1 + more), num_samples, BATCH_ROW_DRAWS, client, encoding):
        lease, deadline = lease_of(request.scope), context.deadline(begun, envelope)
        x = await context.rows(request, client, rows, served, "inputs", deadline)
        cells = None
        if envelope.explain and served.model.manifest.input.columns:
            cells = await context.odd_cells(request, client, rows, served, deadline)
        del body, rows  # which may be many times as large
        lease.shrink(x.nbytes)
        keep = envelope.return_samples
        job = Job(
            served, x, num_samples, envelope.seed, deadline, options.rule, keep, client=client, priors=options.priors
        )
        lease.reserve(kept_bytes(job) + answer_bytes(served, len(x), num_samples if keep else 0, as_arrays), "answer")
        if envelope.explain:
            explained = explanation_bytes(served.model.manifest, len(x), as_arrays)
            lease.reserve(explained + more * x.nbytes + kept_bytes(job, more * len(x)), "explain")
        predicted = await context.engine.predict(job, partial(hung_up, request))
        if envelope.explain:
            parts = context.engine, context.threads
            as_usual = await predicted_as_usual(*parts, job, predicted, partial(hung_up, request))
            steps = _explained_answer(context, job, predicted, options, groups, as_arrays, cells, as_usual)
        else:
            steps = _answer(context, job, predicted, options, groups, as_arrays)
        if job.has_short_answer and not envelope.explain:
            answer, flags = at_once(steps)
        else:
            answer, flags = await context.threads.answers.run(
                steps, client, lease.held, deadline, partial(hung_up, request)
            )
    record = record_of(request.scope)
    record.worked_on(predicted.phases)
    record.used(served.name, served.version, len(x), num_samples, flags)
    media_type = NPZ if as_arrays else JSON
    del x, job, predicted, steps  # an answer may take long to be read
    lease.shrink(sum(map(len, answer)))
    return response(answer, media_type)


def _answer(
    context: Context,
    job: Job,
    predicted: Predicted,
    options: DecisionOptions,
    groups: Int64[np.ndarray, "N"] | None,
    as_arrays: bool,
) -> Steps[tuple[list[bytes], int]]:
    """Return the answer in parts and how many rows are flagged, and note both where rows are watched and counted.

    Raises:
        InvalidInput: naming a row that the model cannot predict.
    """
    served, batch, scores = job.served, predicted.batch, predicted.batch.prediction.scores
    overall = _computed(predicted)
    prediction = predicted.prediction if groups is None else predicted.prediction.of_groups(groups)
    if as_arrays:
        decision = decide(prediction, options)
        flags, answer = decision.flag, [predict_npz(served, predicted, options, job.x, decision)]
        yield
    elif len(overall) * numbers_a_row(served, predicted.samples) > NUMBERS_AT_ONCE:
        decision = decide(prediction, options)
        flags, answer = decision.flag, (yield from predict_json_parts(served, predicted, options, job.x, decision))
    else:
        # Each row is decided by itself, but for `fdr`: once for all requests of the micro-batch that ask alike and
        # bring no groups.
        is_shared = options.fdr is None and groups is None
        shared = batch.shared(options, partial(_decided, job, options)) if is_shared else None
        if shared is not None:
            flags, rows = shared[0].flag[predicted.rows], shared[1][predicted.rows]
        else:
            decision, rows = _decided(job, options, prediction)
            flags = decision.flag
        if predicted.samples is not None:
            rows = with_samples(rows, predicted.samples, scores)
        answer = [predict_json(served, predicted.num_samples, predicted.seed, options, job.x, rows)]
    return answer, _noted(context, job, predicted, overall, flags)


def _explained_answer(
    context: Context,
    job: Job,
    predicted: Predicted,
    options: DecisionOptions,
    groups: Int64[np.ndarray, "N"] | None,
    as_arrays: bool,
    cells: list[OddCells] | None,
    as_usual: Prediction | None,
) -> Steps[tuple[list[bytes], int]]:
    """Do as `_answer` does, and say why each row is strange."""
    served = job.served
    prediction = predicted.prediction if groups is None else predicted.prediction.of_groups(groups)
    overall = _computed(predicted)
    decision = decide(prediction, options)
    explained = Explained((yield from explain(served.model, prediction, job.x, as_usual)), cells)
    if as_arrays:
        answer = [predict_npz(served, predicted, options, job.x, decision, explained)]
    else:
        answer = yield from predict_json_parts(served, predicted, options, job.x, decision, explained)
    return answer, _noted(context, job, predicted, overall, decision.flag)


def _computed(predicted: Predicted) -> Float64[np.ndarray, "N"]:
    """Return the rows' overall uncertainty.

    Raises:
        InvalidInput: naming a row for which it is not a number.
    """
    scores = predicted.batch.prediction.scores
    overall: np.ndarray = scores.by_name()[scores.overall][predicted.rows]
    check_computed(overall, "inputs")
    return overall


def _noted(
    context: Context,
    job: Job,
    predicted: Predicted,
    overall: Float64[np.ndarray, "N"],
    flags: Bool[np.ndarray, "N"],
) -> int:
    """Note rows where they are watched and counted, and return how many are flagged."""
    if job.seed is None:  # else a replay
        job.served.watch(predicted.batch.prediction, predicted.rows, job.x, job.client)
    num_flags = int(np.count_nonzero(flags))
    name = predicted.batch.prediction.scores.overall
    context.metrics.predicted(job.served.key, name, overall, job.num_samples, num_flags)
    return num_flags


def _decided(job: Job, options: DecisionOptions, prediction: Prediction) -> tuple[Decision, list[dict[str, Any]]]:
    """Return what is decided of rows, and what JSON says of each."""
    decision = decide(prediction, options)
    return decision, json_rows(job.served, job.num_samples, prediction, decision)
