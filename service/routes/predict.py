"""`POST /predict`: rows to labels or targets, how uncertain and why, and whether a row is unlike the data."""

import time
from functools import partial
from typing import Any

import numpy as np
from fastapi import APIRouter, Request, Response

from model_store.inference.prediction import Prediction
from service.context import Context, context_of
from service.engine.batching import BATCH_ROW_DRAWS, kept_bytes
from service.engine.decision import Decision, DecisionOptions, check_computed, decide
from service.engine.jobs import Job, Predicted
from service.engine.threads import Steps, at_once
from service.http.openapi import ERRORS, request_body
from service.http.options import decision_options, num_samples_of, refuse_too_many_samples
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
    refuse_too_many_samples(envelope, len(rows), num_samples, served, settings.max_answer_numbers)
    as_arrays = NPZ in header(request, b"accept")
    with context.admission.admitted(len(rows), num_samples, BATCH_ROW_DRAWS, client):
        lease, deadline = lease_of(request.scope), context.deadline(begun, envelope)
        x = await context.rows(request, client, rows, served, "inputs", deadline)
        del body, rows  # which may be many times as large
        lease.shrink(x.nbytes)
        keep = envelope.return_samples
        job = Job(
            served, x, num_samples, envelope.seed, deadline, options.rule, keep, client=client, priors=options.priors
        )
        lease.reserve(kept_bytes(job) + answer_bytes(served, len(x), num_samples if keep else 0, as_arrays), "answer")
        predicted = await context.engine.predict(job, partial(hung_up, request))
        steps = _answer(context, job, predicted, options, as_arrays)
        if job.has_short_answer:
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
    context: Context, job: Job, predicted: Predicted, options: DecisionOptions, as_arrays: bool
) -> Steps[tuple[list[bytes], int]]:
    """Return the answer in parts and how many rows are flagged, and note both where rows are watched and counted.

    Raises:
        InvalidInput: naming a row that the model cannot predict.
    """
    served, batch, scores = job.served, predicted.batch, predicted.batch.prediction.scores
    overall = scores.by_name()[scores.overall][predicted.rows]
    check_computed(overall, "inputs")
    if as_arrays:
        decision = decide(predicted.prediction, options)
        flags, answer = decision.flag, [predict_npz(served, predicted, options, decision)]
        yield
    elif len(overall) * numbers_a_row(served, predicted.samples) > NUMBERS_AT_ONCE:
        decision = decide(predicted.prediction, options)
        flags, answer = decision.flag, (yield from predict_json_parts(served, predicted, options, job.x, decision))
    else:
        # Each row is decided by itself, but for `fdr`: once for all requests of the micro-batch that ask alike.
        shared = batch.shared(options, partial(_decided, job, options)) if options.fdr is None else None
        if shared is not None:
            flags, rows = shared[0].flag[predicted.rows], shared[1][predicted.rows]
        else:
            decision, rows = _decided(job, options, predicted.prediction)
            flags = decision.flag
        if predicted.samples is not None:
            rows = with_samples(rows, predicted.samples, scores)
        answer = [predict_json(served, predicted.num_samples, predicted.seed, options, job.x, rows)]
    if job.seed is None:  # else a replay
        served.watch(batch.prediction, predicted.rows, job.x, job.client)
    num_flags = int(np.count_nonzero(flags))
    context.metrics.predicted(served.key, scores.overall, overall, job.num_samples, num_flags)
    return answer, num_flags


def _decided(job: Job, options: DecisionOptions, prediction: Prediction) -> tuple[Decision, list[dict[str, Any]]]:
    """Return what is decided of rows, and what JSON says of each."""
    decision = decide(prediction, options)
    return decision, json_rows(job.served, job.num_samples, prediction, decision)
