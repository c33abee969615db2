"""`POST /acquire/jobs`, `POST /predict/jobs`, `/jobs`: work on whole pools, which is answered
before it is done."""

import asyncio
import io
import os
import shutil
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from fastapi import APIRouter, Request, Response
from fastapi.responses import FileResponse, StreamingResponse

from model_store.acquisition.choice import (
    candidates_of,
    checked_acquisition,
    checked_beta,
    race_stages,
)
from model_store.acquisition.control import select
from model_store.errors import InvalidInput, NotFound
from model_store.sources.files import check_ids, open_rows, stamp_of
from model_store.state.database import of_disk
from model_store.state.jobs import Job, Jobs, Kind, TooManyJobs
from service.api.openapi import ERRORS, problem_content, request_body
from service.api.options import decision_options, groups_of, num_samples_of, priors_of
from service.api.pool_files import path_in
from service.api.requests import (
    FILE_ENDINGS,
    JSON,
    NPY,
    NPZ,
    PARQUET,
    envelope_of_query,
    read_body,
    request_media_type,
)
from service.api.schemas import AcquireRequest, Envelope, JobAnswer, JobsAnswer, PredictJobRequest
from service.auth.keys import key_name
from service.batch.acquire_work import SELECTED_FILE
from service.batch.asked import Asked
from service.batch.predict_work import GROUPS_FILE
from service.batch.work import IDS_FILE
from service.call import Call
from service.context import Context, context_of
from service.engine.decision import DecisionOptions
from service.engine.keeping import check_keeping
from service.errors import NotDone, Overloaded, TooLarge
from service.models.models import Served
from service.models.reservoir import fresh_seed

RETRY_AFTER_S = 60  # where too many jobs are queued
EVENTS_S = 0.5  # between looks at a job that somebody watches
QUIET_S = 15.0  # after which a watcher is told that nothing has changed

router = APIRouter()
ACCEPTED = {202: {"model": JobAnswer}, 507: problem_content(), **ERRORS}


@dataclass(frozen=True)
class _Rows:
    """Rows of a job that is to be: those of the operator's file, or what came with the request as a
    file."""

    field: str
    path: str  # whole, or the name of a file in the job's folder
    content: bytes | bytearray | np.ndarray | None = None


@router.post(
    "/acquire/jobs",
    status_code=202,
    responses=ACCEPTED,
    openapi_extra=request_body(AcquireRequest, "pool", takes_files=True),
)
async def post_acquire_job(request: Request) -> Response:
    """Rank a pool of any size as /acquire does; answers with the id of a job."""
    return await _accepted(request, "acquire", AcquireRequest, "pool", _asked_to_acquire)


@router.post(
    "/predict/jobs",
    status_code=202,
    responses=ACCEPTED,
    openapi_extra=request_body(PredictJobRequest, "inputs", takes_files=True),
)
async def post_predict_job(request: Request) -> Response:
    """Predict the rows of a file of any size as /predict does; answers with the id of a job."""
    return await _accepted(request, "predict", PredictJobRequest, "inputs", _asked_to_predict)


@router.get("/jobs", responses={200: {"model": JobsAnswer}})
async def get_jobs(request: Request) -> Response:
    """List the jobs that the request's key asked for, the latest first."""
    context, owner = context_of(request), _owner(request)
    jobs = await context.threads.state(lambda: Jobs(context.state).of(owner))
    return _json({"jobs": [_job_json(job, context.settings.job_kept_s) for job in jobs]})


@router.get("/jobs/{job}", responses={200: {"model": JobAnswer}, 404: ERRORS[404]})
async def get_job(request: Request, job: str) -> Response:
    """Say how far a job is."""
    context = context_of(request)
    return _json(_job_json(await _found(request, job), context.settings.job_kept_s))


@router.get(
    "/jobs/{job}/events", responses={200: {"content": {"text/event-stream": {}}}, 404: ERRORS[404]}
)
async def get_job_events(request: Request, job: str) -> Response:
    """Say how far a job is each time it gets further, as server-sent events, until it is over."""
    found = await _found(request, job)
    return StreamingResponse(
        _events(context_of(request), found),
        media_type="text/event-stream",
        headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
    )


@router.get(
    "/jobs/{job}/result",
    responses={
        200: {"content": {JSON: {}, NPZ: {}, PARQUET: {}}},
        404: ERRORS[404],
        409: problem_content(),
    },
)
async def get_job_result(request: Request, job: str) -> Response:
    """Return a job's result: the answer of /acquire, or a table of predictions."""
    found = await _found(request, job)
    if found.state != "done":
        why = f": {found.said}" if found.state == "failed" else ""
        raise NotDone(f"job: expected one that is done, got one that is {found.state}{why}")
    path = Jobs(context_of(request).state).folder / found.id / found.said
    media_type = {".json": JSON, ".npz": NPZ, ".parquet": PARQUET}[path.suffix]
    return FileResponse(path, media_type=media_type, filename=f"{found.id}{path.suffix}")


@router.post("/jobs/{job}/cancel", responses={200: {"model": JobAnswer}, **ERRORS})
async def post_job_cancel(request: Request, job: str) -> Response:
    """Have a job end: at once if it is queued, soon if it runs. One that is over stays as it is."""
    context = context_of(request)
    found = await _found(request, job)
    found = await context.threads.state(lambda: Jobs(context.state).cancel(found.id))
    context.runner.wake()
    return _json(_job_json(found, context.settings.job_kept_s))


@router.delete(
    "/jobs/{job}", responses={200: {"model": JobAnswer}, 404: ERRORS[404], 409: problem_content()}
)
async def delete_job(request: Request, job: str) -> Response:
    """Delete a job that is over, with its result."""
    context = context_of(request)
    found = await _found(request, job)
    if not found.is_over:
        raise NotDone(
            f"job: expected one that is over (POST /jobs/{{job}}/cancel ends it), got one "
            f"{found.state}"
        )
    await context.threads.state(lambda: Jobs(context.state).forget(found.id))
    return _json(_job_json(found, context.settings.job_kept_s))


async def _accepted(
    request: Request,
    kind: Kind,
    envelope_kind: type[Any],
    field: str,
    asked_of: Callable[[Context, Any, Served, int], dict[str, Any]],
) -> Response:
    """Check a request for a job as far as can be done without computing, and queue it."""
    context, owner = context_of(request), _owner(request)
    envelope, served, rows = await _read(request, context, envelope_kind, field)

    def queue() -> Job:
        jobs = Jobs(context.state)
        name, folder = jobs.new_folder()
        try:
            asked = _asked(context, envelope, served, rows, folder, asked_of)
            work = asked.rows * asked.num_samples
            return jobs.add(name, kind, owner, asked.to_json(), work, context.settings.max_jobs)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    try:
        job = await context.threads.state(queue)
    except TooManyJobs:
        raise Overloaded(RETRY_AFTER_S) from None
    context.runner.wake()
    answer = orjson.dumps(_job_json(job, context.settings.job_kept_s))
    return Response(answer, 202, {"Location": f"/jobs/{job.id}"}, media_type=JSON)


async def _read(
    request: Request, context: Context, kind: type[Any], field: str
) -> tuple[Any, Served, _Rows]:
    """Return a job's request, its model, and its rows: a file that came as the body, rows that came
    in it, or the path of the file that it names.
    """
    settings, call = context.settings, Call.of(request, context.settings.deadline_s)
    file_field = f"{field}_file"
    body = await read_body(call, settings.max_body_bytes, settings.max_json_bytes)
    call.begun = time.monotonic()  # the body of a job may take long to come
    call.deadline = call.begun + settings.deadline_s
    ending = {**FILE_ENDINGS, NPY: ".npy"}.get(request_media_type(request))
    if ending is not None:
        envelope = envelope_of_query(request, kind, field, file_field)
        _refuse_what_jobs_have_not(envelope)
        return (
            envelope,
            await context.served(call, envelope),
            _Rows(field, f"{field}{ending}", body),
        )
    envelope, inline = await context.read(
        call, body, kind, field, settings.max_pool_rows, file_field
    )
    _refuse_what_jobs_have_not(envelope)
    served = await context.served(call, envelope)
    named = getattr(envelope, file_field)
    if named is not None:
        path = await context.threads.state(partial(path_in, settings.pools, named, file_field))
        return envelope, served, _Rows(file_field, str(path))
    x = await context.rows(call, inline, served, field)
    return envelope, served, _Rows(field, f"{field}.npy", x)


def _refuse_what_jobs_have_not(envelope: Envelope) -> None:
    """Raise InvalidInput for options that a job cannot have."""
    for name in ("deadline_s", "return_samples", "explain"):
        if getattr(envelope, name, None):
            raise InvalidInput(name, "none of a job", "one")


def _asked(
    context: Context,
    envelope: Any,
    served: Served,
    rows: _Rows,
    folder: Path,
    asked_of: Callable[[Context, Any, Served, int], dict[str, Any]],
) -> Asked:
    """Return what a job is to do, once its file was opened and its ids were looked at; what came
    with the request is kept in the job's folder.
    """
    settings, path = context.settings, folder / rows.path
    num_samples = num_samples_of(envelope, served, settings)
    if rows.content is not None:
        _keep(path, rows.content)
    pool = open_rows(path, served.model.manifest.input, rows.field)
    if pool.rows * num_samples > settings.max_job_row_draws:
        most, got = settings.max_job_row_draws, pool.rows * num_samples
        raise TooLarge(f"rows x num_samples: expected at most {most} of a job, got {got}")
    ids = pool.ids() if envelope.ids is None else envelope.ids
    if ids is not None:
        check_ids(ids, pool.rows)
    if envelope.ids is not None:
        _keep(folder / IDS_FILE, orjson.dumps(envelope.ids))
    if getattr(envelope, "groups", None) is not None:
        groups_of(envelope, pool.rows, served)
        _keep(folder / GROUPS_FILE, orjson.dumps(envelope.groups))
    seed = fresh_seed() if envelope.seed is None else envelope.seed
    chosen: dict[str, Any] = {}
    if isinstance(envelope, AcquireRequest):
        names = [str(i) for i in range(pool.rows)] if ids is None else list(ids)
        check_keeping(envelope.keep, envelope.control, names, ids is not None)
        is_excluding = ids is not None and envelope.exclude_labelled
        known = context.labelled(served.name, names) if is_excluding else set[str]()
        selection = select(names, known, envelope.control, envelope.k, seed)
        if len(selection.ranked) < pool.rows:
            file = io.BytesIO()
            np.savez(file, ranked=selection.ranked, control=selection.control)
            _keep(folder / SELECTED_FILE, file.getvalue())
        is_selected = len(selection.ranked) < pool.rows
        chosen = {"selected": is_selected, "excluded": selection.excluded, "keep": envelope.keep}
    return Asked(
        model=served.name,
        version=served.version,
        num_samples=num_samples,
        seed=seed,
        field=rows.field,
        path=rows.path,
        stamp=stamp_of(path) if rows.content is None else None,
        rows=pool.rows,
        read_as=pool.read_as,
        ignored=pool.ignored,
        **asked_of(context, envelope, served, pool.rows),
        **chosen,
    )


def _asked_to_acquire(
    _: Context, envelope: AcquireRequest, served: Served, rows: int
) -> dict[str, Any]:
    """Return what is asked of /acquire/jobs alone."""
    task = served.model.manifest.task
    named = envelope.acquisition if "acquisition" in envelope.model_fields_set else None
    acquisition = checked_acquisition(named, task)
    beta = checked_beta(envelope.beta, acquisition, task)
    num_samples = envelope.num_samples or served.model.manifest.noise.default_draws
    candidates_of(acquisition, served.model, rows, envelope.k, num_samples)
    race_stages(envelope.race, acquisition, task, num_samples)
    priors = priors_of(envelope, served)
    return {
        "acquisition": acquisition,
        "k": envelope.k,
        "race": envelope.race,
        "beta": beta,
        "priors": priors,
    }


def _asked_to_predict(
    context: Context, envelope: PredictJobRequest, served: Served, _: int
) -> dict[str, Any]:
    """Return what is asked of /predict/jobs alone."""
    num_samples = envelope.num_samples or served.model.manifest.noise.default_draws
    options: DecisionOptions = decision_options(
        envelope, served, num_samples, context.settings.settle
    )
    return {"options": options, "priors": options.priors, "format": envelope.format}


def _keep(path: Path, content: bytes | bytearray | np.ndarray) -> None:
    """Write a file of a job that is to be, so that it lasts."""
    try:
        with path.open("wb") as file:
            if isinstance(content, np.ndarray):
                np.save(file, content, allow_pickle=False)
            else:
                file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise of_disk(error) from error


async def _found(request: Request, job: str) -> Job:
    context, owner = context_of(request), _owner(request)
    return await context.threads.state(lambda: Jobs(context.state).get(job, owner))


async def _events(context: Context, job: Job) -> AsyncIterator[bytes]:
    """Yield an event each time a job has got further; a comment where nothing has changed for
    long."""
    before, told = b"", time.monotonic()
    while True:
        content = orjson.dumps(_job_json(job, context.settings.job_kept_s))
        if content != before:
            before, told = content, time.monotonic()
            yield b"event: " + job.state.encode() + b"\ndata: " + content + b"\n\n"
        elif time.monotonic() - told > QUIET_S:
            told = time.monotonic()
            yield b": still there\n\n"
        if job.is_over or context.ending.is_set():
            return
        await asyncio.sleep(EVENTS_S)
        try:
            job = await context.threads.state(partial(Jobs(context.state).get, job.id))
        except NotFound:  # cancelled and deleted meanwhile
            return


def _owner(request: Request) -> str:
    """Return the name of the request's key, "" where the API is open."""
    return key_name(request.scope) or ""


def _job_json(job: Job, kept_s: float) -> dict[str, Any]:
    """Return what is said of a job."""
    asked = job.request
    is_done = job.state == "done"
    share = 1.0 if is_done else min(1.0, job.done / job.work) if job.work else 0.0
    left = None
    if job.state == "running" and job.done > 0:
        left = job.worked_s / job.done * max(0, job.work - job.done)
    return {
        "id": job.id,
        "kind": job.kind,
        "state": job.state,
        "model": asked["model"],
        "version": asked["version"],
        "rows": asked["rows"],
        "num_samples": asked["num_samples"],
        "seed": asked["seed"],
        "read_as": asked["read_as"],
        "ignored_columns": asked["ignored"],
        "progress": share,
        "worked_s": job.worked_s,
        "seconds_left": left,
        "created": job.created,
        "begun": job.begun,
        "ended": job.ended,
        "expires": None if job.ended is None else job.ended + kept_s,
        "error": job.said if job.state == "failed" else None,
        "result": f"/jobs/{job.id}/result" if is_done else None,
    }


def _json(content: Any) -> Response:
    return Response(orjson.dumps(content), media_type=JSON)
