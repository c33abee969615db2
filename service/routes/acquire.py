"""`POST /acquire`: rank an unlabelled pool."""

import time
from functools import partial

import orjson
from fastapi import APIRouter, Request, Response

from model_store.errors import InvalidInput
from service.context import context_of
from service.engine.acquisition import RANDOM, checked_acquisition, ranking
from service.engine.batching import BATCH_ROW_DRAWS
from service.engine.jobs import Job
from service.http.openapi import ERRORS, request_body
from service.http.options import num_samples_of
from service.http.requests import JSON, hung_up, read_body
from service.http.schemas import AcquireAnswer, AcquireRequest
from service.observability.records import record_of
from service.process.budget import lease_of
from service.registry.reservoir import fresh_seed

router = APIRouter()


@router.post(
    "/acquire",
    responses={200: {"model": AcquireAnswer}, **ERRORS},
    openapi_extra=request_body(AcquireRequest, "pool"),
)
async def post_acquire(request: Request) -> Response:
    """Rank an unlabelled pool: which rows would teach the model most, all under the same draws."""
    context = context_of(request)
    settings = context.settings
    context.admission.refuse_overload()  # before there is work on it
    begun = time.monotonic()
    body = await read_body(request, settings.max_body_bytes, settings.max_json_bytes)
    envelope, rows = await context.read(request, body, AcquireRequest, "pool", settings.max_pool_rows)
    ids = _ids(envelope, len(rows))
    served = await context.served(envelope)
    asked = envelope.acquisition if "acquisition" in envelope.model_fields_set else None
    acquisition = checked_acquisition(asked, served.model.manifest.task)
    num_samples = num_samples_of(envelope, served, settings)
    record = record_of(request.scope)
    with context.admission.admitted(len(rows), num_samples, BATCH_ROW_DRAWS):
        x = await context.rows(rows, served, "pool")
        del body, rows  # which may be many times as large
        lease_of(request.scope).shrink(x.nbytes)
        if acquisition == RANDOM:  # needs a seed and no draws
            scores, seed = None, fresh_seed() if envelope.seed is None else envelope.seed
        else:
            deadline = context.deadline(begun, envelope)
            job = Job(served, x, num_samples, envelope.seed, deadline, acquisition=acquisition)
            scored = await context.engine.score(job, partial(hung_up, request))
            scores, seed = scored.scores, scored.seed
            record.worked_on(scored.phases)
        ranked = await context.threads.answers(partial(ranking, scores, ids, seed, envelope.k))
    draws = 0 if acquisition == RANDOM else num_samples
    context.metrics.ranked(served.key, len(x), draws)
    record.used(served.name, served.version, len(x), draws)
    answer = {
        "model": served.name,
        "version": served.version,
        "acquisition": acquisition,
        "num_samples": num_samples,
        "seed": seed,
        "pool_size": len(x),
        "ranking": ranked,
    }
    return Response(orjson.dumps(answer), media_type=JSON)


def _ids(envelope: AcquireRequest, rows: int) -> list[str]:
    ids = envelope.ids
    if ids is None:
        return [str(i) for i in range(rows)]
    if len(ids) != rows:
        raise InvalidInput("ids", f"one for each of the {rows} pool rows", f"{len(ids)}")
    if len(set(ids)) != rows:
        raise InvalidInput("ids", "different names", "some that are the same")
    return ids
