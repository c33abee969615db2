"""`POST /invocations`, `GET /ping` and `GET /version`: MLflow's scoring protocol.

It answers for the model that requests without a name mean, or the one that `params.model` names. As
with `/v2`, its description is others' and not in our OpenAPI document.
"""

import time
from collections.abc import Hashable
from functools import partial

from fastapi import APIRouter, Request, Response

from model_store.errors import InvalidInput
from service import VERSION
from service.api.health import refuse_unready
from service.api.predict import AsJson
from service.api.requests import JSON, read_body, request_media_type
from service.api.responses import response
from service.context import Context, context_of
from service.errors import TooLarge, Unsupported
from service.integrations.mlflow.forms import envelope_of_params, read_invocation, rows_of
from service.pools.files import open_pool
from service.predicting import Asked, begin, in_steps, predict
from service.server.budget import reservation_of
from service.telemetry.records import record_of

CSV = "text/csv"
CSV_BYTES = 20  # that reading a byte of CSV takes, at most

router = APIRouter(include_in_schema=False)


@router.get("/ping")
async def get_ping(request: Request) -> Response:
    """Say that there is a model to predict with."""
    refuse_unready(context_of(request))
    return Response(b"\n", media_type="text/plain")


@router.get("/version")
async def get_version() -> Response:
    """Say which version of Dubito this is."""
    return Response(VERSION.encode(), media_type="text/plain")


@router.post("/invocations")
async def post_invocations(request: Request) -> Response:
    """Predict rows; `predictions` are those of `POST /predict`, and so is what stands beside
    them."""
    context, client, begun = begin(request)
    if request.query_params:
        raise InvalidInput("query", "nothing, since params stand in the body", "parameters")
    asked = await _read(request, context, client, begun)
    return response(await predict(request, context, asked, AsJson()), JSON)


async def _read(request: Request, context: Context, client: Hashable, begun: float) -> Asked:
    """Return what a request asks; its body goes with its rows."""
    settings, reservation, media_type = (
        context.settings,
        reservation_of(request.scope),
        request_media_type(request),
    )
    if media_type == CSV:
        return await _read_csv(request, context, client, begun)
    if media_type != JSON:
        raise Unsupported(f"Content-Type: expected {JSON} or {CSV}, got another")
    body = await read_body(request, settings.max_json_bytes, settings.max_json_bytes)
    steps = read_invocation(body, settings.max_rows, reservation)
    size = len(body)
    envelope, form, given = await in_steps(
        request, context, steps, client, size, begun + settings.deadline_s
    )
    del body, steps
    record_of(request.scope).read = time.perf_counter()
    served = await context.served(envelope)
    making = rows_of(form, given, served.model.manifest.input, settings.max_rows)
    rows = await in_steps(request, context, making, client, size, context.deadline(begun, envelope))
    return Asked(client, begun, envelope, served, rows)


async def _read_csv(request: Request, context: Context, client: Hashable, begun: float) -> Asked:
    """Return what a request asks whose body is a CSV file."""
    settings, reservation = context.settings, reservation_of(request.scope)
    body = await read_body(request, settings.max_json_bytes, settings.max_json_bytes)
    reservation.reserve(CSV_BYTES * len(body), "body")
    envelope = envelope_of_params({})
    served = await context.served(envelope)
    spec = served.model.manifest.input
    pool = await context.threads.state(partial(open_pool, body, spec, "body", ".csv"))
    if pool.rows > settings.max_rows:
        raise TooLarge(f"body: expected at most {settings.max_rows} rows, got {pool.rows}")
    return Asked(client, begun, envelope, served, pool)
