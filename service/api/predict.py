"""`POST /predict`: rows to labels or targets, how uncertain and why, and whether a row is unlike
the data."""

from functools import partial
from typing import Any

import numpy as np
from fastapi import APIRouter, Request, Response
from jaxtyping import Bool, Int64

from model_store.inference.explanation import explain
from model_store.inference.prediction import Prediction
from service.api.explanations import Explained
from service.api.openapi import ERRORS, request_body
from service.api.predictions import PredictAnswer
from service.api.requests import JSON, NPZ, header, read_body
from service.api.responses import (
    NUMBERS_AT_ONCE,
    json_rows,
    numbers_a_row,
    predict_json,
    predict_json_parts,
    predict_npz,
    response,
    with_samples,
)
from service.api.schemas import PredictRequest
from service.call import Call
from service.context import Context, context_of
from service.engine.decision import Decision, DecisionOptions, decide
from service.engine.jobs import Job, Predicted
from service.predicting import INPUTS, Asked, ToExplain, predict

Answer = tuple[list[bytes], Bool[np.ndarray, "N"]]  # in parts, and which rows are flagged
Groups = Int64[np.ndarray, "N"] | None

router = APIRouter()


@router.post(
    "/predict",
    responses={200: {"model": PredictAnswer, "content": {NPZ: {}}}, **ERRORS},
    openapi_extra=request_body(PredictRequest, INPUTS),
)
async def post_predict(request: Request) -> Response:
    """Predict rows: label or target, how uncertain and why, and whether a row is unlike the
    data."""
    context = context_of(request)
    asked = await _read(context, context.begin(request))
    as_arrays = NPZ in header(request, b"accept")
    answer = await predict(context, asked, AsArrays() if as_arrays else AsJson())
    return response(answer, NPZ if as_arrays else JSON)


async def _read(context: Context, call: Call) -> Asked:
    """Return what a request asks; its body goes with its rows."""
    settings = context.settings
    body = await read_body(call, settings.max_body_bytes, settings.max_json_bytes)
    envelope, rows = await context.read(call, body, PredictRequest, INPUTS, settings.max_rows)
    return Asked(call, envelope, await context.served(call, envelope), rows)


class AsJson:
    """Answers as JSON."""

    as_arrays = False

    def write(
        self,
        job: Job,
        predicted: Predicted,
        options: DecisionOptions,
        groups: Groups,
        to_explain: ToExplain | None,
    ) -> Answer:
        """Return an answer. What is decided of few rows may be that of others in their micro-batch
        too."""
        served, batch = job.served, predicted.batch
        prediction = (
            predicted.prediction if groups is None else predicted.prediction.of_groups(groups)
        )
        if to_explain is not None:
            decision = decide(prediction, options)
            as_usual, cells = to_explain.as_usual, to_explain.cells
            why = explain(served.model, prediction, job.x, as_usual, job.call.pause)
            manifest = served.model.manifest
            parts = predict_json_parts(
                job, predicted, options, decision, Explained(manifest, why, cells)
            )
            return parts, decision.flag
        if len(job.x) * numbers_a_row(served, predicted.samples) > NUMBERS_AT_ONCE:
            decision = decide(prediction, options)
            return predict_json_parts(job, predicted, options, decision), decision.flag
        # Each row is decided by itself, but for `fdr`: once for all requests of the micro-batch
        # that ask alike and
        # bring no groups.
        is_shared = options.fdr is None and groups is None
        shared = batch.shared(options, partial(_decided, job, options)) if is_shared else None
        if shared is not None:
            flags, rows = shared[0].flag[predicted.rows], shared[1][predicted.rows]
        else:
            decision, rows = _decided(job, options, prediction)
            flags = decision.flag
        if predicted.samples is not None:
            rows = with_samples(rows, predicted.samples, batch.prediction.scores)
        return [
            predict_json(served, predicted.num_samples, predicted.seed, options, job.x, rows)
        ], flags


class AsArrays:
    """Answers as npz."""

    as_arrays = True

    def write(
        self,
        job: Job,
        predicted: Predicted,
        options: DecisionOptions,
        groups: Groups,
        to_explain: ToExplain | None,
    ) -> Answer:
        """Return an answer."""
        prediction = (
            predicted.prediction if groups is None else predicted.prediction.of_groups(groups)
        )
        decision, explained = decide(prediction, options), None
        if to_explain is not None:
            as_usual = to_explain.as_usual
            why = explain(job.served.model, prediction, job.x, as_usual, job.call.pause)
            explained = Explained(job.served.model.manifest, why, to_explain.cells)
        job.call.pause()
        return [
            predict_npz(job.served, predicted, options, job.x, decision, explained)
        ], decision.flag


def _decided(
    job: Job, options: DecisionOptions, prediction: Prediction
) -> tuple[Decision, list[dict[str, Any]]]:
    """Return what is decided of rows, and what JSON says of each."""
    decision = decide(prediction, options)
    return decision, json_rows(job.served, job.num_samples, prediction, decision)
