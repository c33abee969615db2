"""`POST /invocations`, `GET /ping` and `GET /version`: MLflow's scoring protocol.

It answers for the model that requests without a name mean, or the one that `params.model` names. As
with `/v2`, its description is others' and not in our OpenAPI document.
"""

import time
from functools import partial

from fastapi import APIRouter, Request, Response

from model_store.errors import InvalidInput
from service import VERSION
from service.api.health import refuse_unready
from service.api.pool_files import open_file
from service.api.predict import ToPredict, predict, run_reading
from service.api.requests import came, read_body, refuse_none_or_many, request_media_type
from service.api.responses import predict_json, response
from service.call import Call
from service.context import Context, context_of
from service.error_forms import JSON
from service.errors import Unsupported
from service.integrations.mlflow.forms import envelope_of_params, read_invocation, rows_of

CSV = "text/csv"

router = APIRouter(include_in_schema=False)


@router.get("/ping")
async def get_ping(request: Request) -> Response:
    refuse_unready(context_of(request))
    return Response(b"\n", media_type="text/plain")


@router.get("/version")
async def get_version() -> Response:
    return Response(VERSION.encode(), media_type="text/plain")


@router.post("/invocations")
async def post_invocations(request: Request) -> Response:
    """Predict rows; `predictions` are those of `POST /predict`, and so is what stands with
    them."""
    context = context_of(request)
    call = context.begin(request)
    if request.query_params:
        raise InvalidInput("query", "nothing, since params stand in the body", "parameters")
    asked = await _read(context, call)
    return response(await predict(context, asked, predict_json), JSON)


async def _read(context: Context, call: Call) -> ToPredict:
    settings, media_type = context.settings, request_media_type(call.request)
    if media_type == CSV:
        return await _read_csv(context, call)
    if media_type != JSON:
        raise Unsupported(f"Content-Type: expected {JSON} or {CSV}, got {came(call.request)}")
    body = await read_body(call, settings.max_json_bytes, settings.max_json_bytes)
    work = partial(read_invocation, body, settings.max_rows, call)
    size = len(body)
    envelope, form, given = await run_reading(context, call, size, work)
    del body, work
    call.record.read = time.perf_counter()
    served = await context.served(call, envelope)
    spec = served.model.manifest.input
    spec = spec.encoded if envelope.encoded else spec
    rows = await run_reading(
        context, call, size, partial(rows_of, form, given, spec, settings.max_rows)
    )
    return ToPredict(call, envelope, served, rows)


async def _read_csv(context: Context, call: Call) -> ToPredict:
    settings = context.settings
    body = await read_body(call, settings.max_json_bytes, settings.max_json_bytes)
    envelope = envelope_of_params({})
    served = await context.served(call, envelope)
    pool = await open_file(context, call, body, served, "body", envelope.encoded, ".csv")
    refuse_none_or_many("body", pool.rows, settings.max_rows)
    return ToPredict(call, envelope, served, pool)
