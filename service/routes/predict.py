"""`POST /predict`: rows to labels or targets, how uncertain and why, and whether a row is unlike the data."""

import time
from collections.abc import Hashable
from functools import partial
from typing import Any

import numpy as np
from fastapi import APIRouter, Request, Response

from model_store.inference.prediction import Prediction
from service.context import Context, context_of
from service.engine.batching import BATCH_ROW_DRAWS
from service.engine.decision import Decision, DecisionOptions, check_computed, decide
from service.engine.jobs import Job, Predicted
from service.http.openapi import ERRORS, request_body
from service.http.options import decision_options, num_samples_of, refuse_too_many_samples
from service.http.requests import JSON, NPZ, header, hung_up, read_body
from service.http.responses import json_rows, predict_json, predict_npz, with_samples
from service.http.schemas import PredictAnswer, PredictRequest
from service.observability.records import record_of
from service.process.budget import lease_of
from service.process.clients import client_of

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
    context.admission.refuse_overload()  # before there is work on it
    begun = time.monotonic()
    body = await read_body(request, settings.max_body_bytes, settings.max_json_bytes)
    envelope, rows = await context.read(request, body, PredictRequest, "inputs", settings.max_rows)
    served = await context.served(envelope)
    num_samples = num_samples_of(envelope, served, settings)
    options = decision_options(envelope, served, num_samples, settings.settle)
    refuse_too_many_samples(envelope, len(rows), num_samples, served, settings.max_answer_numbers)
    as_arrays = NPZ in header(request, b"accept")
    with context.admission.admitted(len(rows), num_samples, BATCH_ROW_DRAWS):
        x = await context.rows(rows, served, "inputs")
        del body, rows  # which may be many times as large
        lease_of(request.scope).shrink(x.nbytes)
        deadline = context.deadline(begun, envelope)
        job = Job(served, x, num_samples, envelope.seed, deadline, options.rule, envelope.return_samples)
        predicted = await context.engine.predict(job, partial(hung_up, request))
        answering = partial(_answer, context, job, predicted, options, as_arrays, client_of(request.scope))
        answer, flags = answering() if job.has_short_answer else await context.threads.answers(answering)
    record = record_of(request.scope)
    record.worked_on(predicted.phases)
    record.used(served.name, served.version, len(x), num_samples, flags)
    return Response(answer, media_type=NPZ if as_arrays else JSON)


def _answer(
    context: Context, job: Job, predicted: Predicted, options: DecisionOptions, as_arrays: bool, client: Hashable
) -> tuple[bytes, int]:
    """Return the answer and how many rows are flagged, and note both where live rows are watched and counted.

    Raises:
        InvalidInput: naming a row that the model cannot predict.
    """
    served, batch, scores = job.served, predicted.batch, predicted.batch.prediction.scores
    overall = scores.by_name()[scores.overall][predicted.rows]
    check_computed(overall, "inputs")
    if as_arrays:
        decision = decide(predicted.prediction, options)
        flags, answer = decision.flag, predict_npz(served, predicted, options, decision)
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
        answer = predict_json(served, predicted.num_samples, predicted.seed, options, rows)
    if job.seed is None:  # else a replay
        served.watch(batch.prediction, predicted.rows, job.x, client)
    num_flags = int(np.count_nonzero(flags))
    context.metrics.predicted(served.key, scores.overall, overall, job.num_samples, num_flags)
    return answer, num_flags


def _decided(job: Job, options: DecisionOptions, prediction: Prediction) -> tuple[Decision, list[dict[str, Any]]]:
    """Return what is decided of rows, and what JSON says of each."""
    decision = decide(prediction, options)
    return decision, json_rows(job.served, job.num_samples, prediction, decision)
