"""`POST /acquire`: rank an unlabelled pool."""

import time
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import orjson
from fastapi import APIRouter, Request, Response
from jaxtyping import Float64, Int64

from model_store.acquisition.choice import (
    RANDOM,
    Copies,
    candidates_of,
    checked_acquisition,
    copies_of,
    finalists,
    first_draws,
    joint_ranking,
    power_ranking,
    ranking,
)
from model_store.errors import InvalidInput
from model_store.inference.prediction import check_computed
from model_store.types import Steps
from service.context import context_of
from service.engine.batching import BATCH_ROW_DRAWS, kept_bytes
from service.engine.jobs import Job, PoolScores
from service.http.openapi import ERRORS, request_body
from service.http.options import num_samples_of, priors_of
from service.http.requests import JSON, hung_up, read_body
from service.http.responses import stated_priors
from service.http.schemas import AcquireAnswer, AcquireRequest
from service.observability.records import record_of
from service.process.budget import lease_of
from service.registry.reservoir import fresh_seed

ID_BYTES = 200  # of a row's name while a pool is ranked
COPY_BYTES = 200  # of a row while rows that are the same are looked for

LOST = float(np.finfo(np.float64).min)  # the score of a row that was left out of a race

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
    client = context.client(request)
    context.admission.refuse_overload(1, client)  # before there is work on it
    begun = time.monotonic()
    body = await read_body(request, settings.max_body_bytes, settings.max_json_bytes)
    envelope, rows = await context.read(request, client, body, AcquireRequest, "pool", settings.max_pool_rows)
    if envelope.ids is not None and len(envelope.ids) != len(rows):
        raise InvalidInput("ids", f"one for each of the {len(rows)} pool rows", f"{len(envelope.ids)}")
    if envelope.ids is not None and len(set(envelope.ids)) != len(rows):
        raise InvalidInput("ids", "different names", "some that are the same")
    served = await context.served(envelope)
    asked = envelope.acquisition if "acquisition" in envelope.model_fields_set else None
    acquisition = checked_acquisition(asked, served.model.manifest.task)
    num_samples = num_samples_of(envelope, served, settings)
    priors = priors_of(envelope, served)
    record = record_of(request.scope)
    encoding = served.model.encoding_draws
    with context.admission.admitted(len(rows), num_samples, BATCH_ROW_DRAWS, client, encoding):
        lease, deadline = lease_of(request.scope), context.deadline(begun, envelope)
        x = await context.rows(request, client, rows, served, "pool", deadline)
        del body, rows  # which may be many times as large
        lease.shrink(x.nbytes)
        lease.reserve(ID_BYTES * len(x), "ids")
        kept = candidates_of(acquisition, served.model, len(x), envelope.k, num_samples)
        raced = first_draws(envelope.race, acquisition, served.model.manifest.task, num_samples)
        last: Int64[np.ndarray, "n"] | None = None  # of a race
        steps: Steps[list[dict[str, Any]]]
        if acquisition == RANDOM:  # needs a seed and no draws
            seed = fresh_seed() if envelope.seed is None else envelope.seed
            steps = _ranking(None, envelope, len(x), seed)
        else:
            copies, pool = None, x
            if acquisition in served.model.predictive.batches:
                lease.reserve(COPY_BYTES * len(x) + (0 if kept is None else x.nbytes), "pool")
                copies = await context.threads.answers.run(copies_of(x), client, x.nbytes, deadline)
                pool = x if kept is None else x[copies.first]
            job = Job(
                served,
                pool,
                num_samples,
                envelope.seed,
                deadline,
                acquisition=acquisition,
                candidates=kept,
                client=client,
                priors=priors,
            )
            lease.reserve(kept_bytes(job), "pool")
            if raced is not None and envelope.race is not None:
                early = replace(job, num_samples=raced, is_race=True)
                scored = await context.engine.score(early, partial(hung_up, request))
                record.worked_on(scored.phases)
                assert scored.errors is not None
                last = finalists(scored.scores, scored.errors, raced, envelope.k, envelope.race)
                lease.reserve(x[:1].nbytes * len(last), "pool")
                job = replace(job, x=x[last], seed=scored.seed)
            scored = await context.engine.score(job, partial(hung_up, request))
            seed = scored.seed
            record.worked_on(scored.phases)
            if copies is None:
                scores = scored.scores
                if last is not None:
                    scores = np.full(len(x), LOST)
                    scores[last] = scored.scores
                steps = _ranking(scores, envelope, len(x), seed)
            else:
                steps = _batch_ranking(job, scored, copies, _ids(envelope, len(x)), envelope.k)
        ranked = await context.threads.answers.run(steps, client, x.nbytes, deadline)
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
        "priors": stated_priors(served, priors),
        "race": envelope.race,
        "finalists": None if last is None else len(last),
        "ranking": ranked,
    }
    return Response(orjson.dumps(answer), media_type=JSON)


def _ids(envelope: AcquireRequest, rows: int) -> list[str]:
    return [str(i) for i in range(rows)] if envelope.ids is None else envelope.ids


def _ranking(
    scores: Float64[np.ndarray, "N"] | None, envelope: AcquireRequest, rows: int, seed: int
) -> Steps[list[dict[str, Any]]]:
    """Return the ranking of a pool by a score of each row."""
    ids = _ids(envelope, rows)
    yield
    return ranking(scores, ids, seed, envelope.k)


def _batch_ranking(
    job: Job, scored: PoolScores, copies: Copies, ids: list[str], k: int
) -> Steps[list[dict[str, Any]]]:
    """Return the ranking of a pool of which a batch is chosen; for a joint score the job is of `copies.first`."""
    yield
    if scored.best is None:
        return power_ranking(scored.scores, copies, ids, scored.seed, k)
    check_computed(scored.scores[copies.group], "pool")
    assert job.acquisition is not None
    kind = job.served.model.predictive.joint_scores[job.acquisition]
    joint = kind(scored.best.candidates, job.num_samples, scored.seed)
    return (yield from joint_ranking(joint, scored.best.rows, copies, ids, k))
