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
from model_store.acquisition.control import Selection, select
from model_store.errors import InvalidInput
from model_store.inference.prediction import check_computed
from model_store.state.labels import Acquisition, has_state, keep_acquired, row_format
from model_store.types import Steps
from service.context import Context, context_of
from service.engine.batching import BATCH_ROW_DRAWS, kept_bytes
from service.engine.jobs import Job, PoolScores
from service.engine.keeping import acquired_rows, check_keeping, control_said, set_aside
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
        whole, ids, pool_size = x, _ids(envelope, len(x)), len(x)
        asked_seed = fresh_seed() if envelope.seed is None and envelope.control else envelope.seed
        chosen = await _selected(context, envelope, served.name, ids, asked_seed or 0)
        k = envelope.k - len(chosen.control)
        if len(chosen.ranked) < len(x):
            lease.reserve(x.nbytes, "pool")
            x, ids = x[chosen.ranked], [ids[i] for i in chosen.ranked.tolist()]
        nothing = k == 0 or len(x) == 0
        kept = None if nothing else candidates_of(acquisition, served.model, len(x), k, num_samples)
        raced = first_draws(envelope.race, acquisition, served.model.manifest.task, num_samples)
        last: Int64[np.ndarray, "n"] | None = None  # of a race
        steps: Steps[list[dict[str, Any]]]
        if acquisition == RANDOM or nothing:  # needs a seed and no draws
            seed = fresh_seed() if asked_seed is None else asked_seed
            steps = _ranking(None, ids if not nothing else [], seed, k)
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
                asked_seed,
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
                last = finalists(scored.scores, scored.errors, raced, k, envelope.race)
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
                steps = _ranking(scores, ids, seed, k)
            else:
                steps = _batch_ranking(job, scored, copies, ids, k)
        ranked = await context.threads.answers.run(_in_pool(steps, chosen), client, x.nbytes, deadline)
        aside = whole[chosen.control]
        said: list[dict[str, Any]] = []
        if len(aside):
            job = Job(served, aside, num_samples, seed, deadline, client=client)
            lease.reserve(kept_bytes(job), "pool")
            predicted = await context.engine.predict(job, partial(hung_up, request))
            said = control_said(served.model.manifest, predicted.prediction)
            ranked += set_aside(chosen.control.tolist(), _ids(envelope, pool_size), len(ranked))
        if envelope.keep:
            how = Acquisition(
                *(served.name, served.version, row_format(served.model.manifest), acquisition, seed, num_samples)
            )
            await context.threads.state(lambda: keep_acquired(context.state, how, acquired_rows(whole, ranked, said)))
    draws = 0 if acquisition == RANDOM else num_samples
    context.metrics.ranked(served.key, pool_size, draws)
    record.used(served.name, served.version, pool_size, draws)
    answer = {
        "model": served.name,
        "version": served.version,
        "acquisition": acquisition,
        "num_samples": num_samples,
        "seed": seed,
        "pool_size": pool_size,
        "excluded": chosen.excluded,
        "priors": stated_priors(served, priors),
        "race": envelope.race,
        "finalists": None if last is None else len(last),
        "ranking": ranked,
    }
    return Response(orjson.dumps(answer), media_type=JSON)


async def _selected(context: Context, envelope: AcquireRequest, model: str, ids: list[str], seed: int) -> Selection:
    """Return what becomes of the pool's rows: which are ranked, and which set aside.

    Raises:
        InvalidInput: naming an id under which no row can be kept.
    """
    are_named = envelope.ids is not None
    if not envelope.keep and not (are_named and has_state(context.settings.state)):
        check_keeping(False, envelope.control, ids, are_named)
        return Selection(np.arange(len(ids)), np.empty(0, dtype=np.int64), 0)

    def work() -> Selection:
        check_keeping(envelope.keep, envelope.control, ids, are_named)
        known = context.labelled(model, ids) if are_named and envelope.exclude_labelled else set[str]()
        return select(ids, known, envelope.control, envelope.k, seed)

    return await context.threads.state(work)


def _in_pool(steps: Steps[list[dict[str, Any]]], chosen: Selection) -> Steps[list[dict[str, Any]]]:
    """Return a ranking with the rows' places in the whole pool."""
    ranked = yield from steps
    places = chosen.ranked.tolist()
    return [{**row, "index": places[row["index"]], "control": False} for row in ranked]


def _ids(envelope: AcquireRequest, rows: int) -> list[str]:
    return [str(i) for i in range(rows)] if envelope.ids is None else envelope.ids


def _ranking(
    scores: Float64[np.ndarray, "N"] | None, ids: list[str], seed: int, k: int
) -> Steps[list[dict[str, Any]]]:
    """Return the ranking of a pool by a score of each row."""
    yield
    return ranking(scores, ids, seed, k) if ids else []


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
