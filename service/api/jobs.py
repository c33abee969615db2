"""Routes for background jobs."""

import io
import shutil
import time
from collections.abc import Iterable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import orjson
from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import FileResponse
from pydantic import BaseModel

from model_store.acquisition.choice import max_joint_candidates
from model_store.acquisition.ranking import race_stages
from model_store.artifacts.disk import write_synced
from model_store.errors import InvalidInput, NotFound, TooLarge
from model_store.sources.files import file_stamp, open_rows
from model_store.sources.row_file import RowFile
from model_store.sources.rows import RowReader
from model_store.state.database import as_state_errors, may_be_damaged
from model_store.state.jobs import Job, Jobs, Kind, TooManyJobs
from model_store.types import Content, JsonObject
from service import limits
from service.api.acquire import AcquireAnswer, find_names, select_rows
from service.api.media_types import JSON, NPZ, PARQUET
from service.api.openapi import BINARY, request_body
from service.api.options import resolve_groups, resolve_num_samples
from service.api.predict import RowWork, read_work, to_numbers
from service.api.responses import format_timestamp, json_response
from service.api.schemas import AcquireRequest, PredictJobRequest, Timestamp
from service.auth.scopes import SCOPES_KEY, allowed_models, key_name, needs
from service.batch.computation import request_fields
from service.batch.job_process import GROUPS_FILE, IDS_FILE, SELECTED_FILE, JobRequest
from service.context import Audit, Context, CurrentContext, LinkPrefix
from service.engine.pool_ranking import check_keep
from service.errors import NotDone, Overloaded, PastDeadline
from service.request_context import RequestContext, get_link_prefix
from service.server.shares import is_within_share
from service.telemetry.logs import AuditLog

RETRY_AFTER_S = 60  # if too many jobs are queued
FILE_TYPES = {".npz": NPZ, ".parquet": PARQUET, ".txt": "text/plain"}
MEDIA_TYPES = {".json": JSON, **FILE_TYPES}


class JobAnswer(BaseModel):
    """A background job. `owner` is the name of the API key that created it."""

    id: str
    kind: Literal["acquire", "predict", "candidate"]
    state: Literal["queued", "running", "done", "failed", "cancelled"]
    owner: str | None
    model: str
    version: str
    rows: int
    num_samples: int
    seed: int
    read_as: str
    ignored_columns: list[str]
    progress: float
    worked_s: float
    seconds_left: float | None
    created: Timestamp
    started: Timestamp | None
    ended: Timestamp | None
    expires: Timestamp | None
    error: str | None
    result: str | None


class JobsAnswer(BaseModel):
    """An API key's jobs, latest first."""

    jobs: list[JobAnswer]


router = APIRouter(tags=["Jobs"])
READ = [needs("read")]


async def _access(request: Request) -> tuple[str | None, frozenset[str] | None]:
    is_admin = "admin" in request.scope[SCOPES_KEY]
    owner = None if is_admin else (key_name(request.scope) or "")
    return owner, allowed_models(request.scope)


# The owner and models whose jobs the request's key can use, or None for all
Access = Annotated[tuple[str | None, frozenset[str] | None], Depends(_access)]


@router.get("/jobs", response_model=JobsAnswer, dependencies=READ)
async def get_jobs(context: CurrentContext, access: Access, prefix: LinkPrefix) -> Response:
    """List the API key's jobs, latest first. Administrators see all jobs."""

    def list_jobs() -> JsonObject:
        jobs = Jobs(context.state).all(*access)
        return {"jobs": [job_json(context, job, prefix) for job in jobs]}

    return json_response(await context.threads.jobs(list_jobs))


async def _find_job(context: CurrentContext, access: Access, job: str) -> Job:
    return await context.threads.jobs(lambda: Jobs(context.state).get(job, *access))


OwnJob = Annotated[Job, Depends(_find_job)]  # path parameter


@router.get("/jobs/{job}", response_model=JobAnswer, dependencies=READ)
async def get_job(context: CurrentContext, prefix: LinkPrefix, job: OwnJob) -> JsonObject:
    """Return the state and progress of a job."""
    return job_json(context, job, prefix)


@router.get(
    "/jobs/{job}/result",
    response_model=AcquireAnswer,
    responses={200: {"content": {kind: {"schema": BINARY} for kind in FILE_TYPES.values()}}},
    dependencies=READ,
)
async def get_job_result(context: CurrentContext, job: OwnJob) -> Response:
    """Return a job's result: a ranking, a table of predictions or the log of a fit."""
    if job.state != "done":
        reason = f": {job.outcome}" if job.state == "failed" else ""
        raise NotDone("job", "a finished job", f"{job.state}{reason}")
    with may_be_damaged(f"job {job.id}"):
        path = Jobs(context.state).folder / job.id / job.outcome
        media_type = MEDIA_TYPES[path.suffix]
    if not path.exists():
        raise NotFound("job", "a job with a result", "a missing file")
    return FileResponse(path, media_type=media_type, filename=f"{job.id}{path.suffix}")


@router.post("/jobs/{job}/cancel", response_model=JobAnswer, dependencies=READ)
async def post_job_cancel(
    context: CurrentContext, prefix: LinkPrefix, job: OwnJob, audit: Audit
) -> JsonObject:
    """Cancel a queued or running job."""
    cancelled = await context.threads.jobs(lambda: cancel_job(context, job, audit))
    context.runner.wake()
    return job_json(context, cancelled, prefix)


@router.delete("/jobs/{job}", response_model=JobAnswer, dependencies=READ)
async def delete_job(
    context: CurrentContext, prefix: LinkPrefix, job: OwnJob, audit: Audit
) -> JsonObject:
    """Delete a finished job and its result."""
    if not job.is_over:
        expected = "a finished job (POST /jobs/{job}/cancel stops it)"
        raise NotDone("job", expected, job.state)

    def forget() -> None:
        Jobs(context.state).forget(job.id)
        _audit(audit, "delete job", job, None)

    await context.threads.jobs(forget)
    return job_json(context, job, prefix)


def cancel_job(context: Context, job: Job, audit: AuditLog) -> Job:
    cancelled = Jobs(context.state).cancel(job.id)
    _audit(audit, "cancel job", job, "cancelled" if cancelled.cancel else cancelled.state)
    return cancelled


def _audit(audit: AuditLog, action: str, job: Job, after: str | None) -> None:
    with may_be_damaged(f"job {job.id}"):
        version = job.request["model"], job.request["version"]
    audit(action, *version, job.state, after, job.id)


def job_json(context: Context, job: Job, prefix: str = "") -> JsonObject:
    """Return a job as JSON. `prefix` is the prefix for its links."""
    request, is_done = job.request, job.state == "done"
    share = 1.0 if is_done else min(1.0, job.done / job.work) if job.work else 0.0
    left = expires = None
    if job.state == "running" and job.done > 0:
        left = job.worked_s / job.done * max(0, job.work - job.done)
    if job.ended is not None:
        expires = job.ended + context.settings.job_retention_s
    with may_be_damaged(f"job {job.id}"):
        names = ("model", "version", "rows", "num_samples", "seed", "read_as")
        options = {name: request[name] for name in names} | {"ignored_columns": request["ignored"]}
    return {
        "id": job.id,
        "kind": job.kind,
        "state": job.state,
        "owner": job.owner or None,
        **options,
        "progress": share,
        "worked_s": job.worked_s,
        "seconds_left": left,
        "created": format_timestamp(job.created),
        "started": format_timestamp(job.started),
        "ended": format_timestamp(job.ended),
        "expires": format_timestamp(expires),
        "error": job.outcome if job.state == "failed" else None,
        "result": f"{prefix}/jobs/{job.id}/result" if is_done else None,
    }


@router.post(
    "/acquire/jobs",
    status_code=202,
    response_model=JobAnswer,
    openapi_extra=request_body(AcquireRequest),
    dependencies=[needs("acquire")],
)
async def post_acquire_job(request: Request, context: CurrentContext) -> Response:
    """Create a job that ranks a pool as /acquire does."""
    return await _accept(request, context, "acquire", AcquireRequest, "pool")


@router.post(
    "/predict/jobs",
    status_code=202,
    response_model=JobAnswer,
    openapi_extra=request_body(PredictJobRequest),
    dependencies=[needs("predict")],
)
async def post_predict_job(request: Request, context: CurrentContext) -> Response:
    """Create a job that predicts a file of rows as /predict does."""
    return await _accept(request, context, "predict", PredictJobRequest, "inputs")


async def _accept(
    request: Request, context: Context, kind: Kind, envelope_kind: type[Any], field: str
) -> Response:
    settings = context.settings
    call = RequestContext.from_request(request, settings.deadline_s)
    work = await read_work(context, call, envelope_kind, field, settings.max_pool_rows, is_job=True)
    for name in ("deadline_s", "return_samples", "explain"):
        if getattr(work.envelope, name, None):
            raise InvalidInput(name, "no value for a job", "one")
    if not isinstance(work.rows, RowFile):
        work.rows = await to_numbers(context, work)
    num_samples = resolve_num_samples(work.envelope, work.loaded.model, settings)
    row_draws = len(work.rows) * num_samples
    if row_draws > limits.MAX_JOB_ROW_DRAWS:
        expected = f"at most {limits.MAX_JOB_ROW_DRAWS} per job"
        raise TooLarge("rows x num_samples", expected, str(row_draws))
    rows, model = work.rows, work.loaded.model
    blocks: Iterable[Any] = [rows]
    if isinstance(rows, RowFile):
        blocks = RowReader(rows.spec, work.field, call, model.text_encoder).read_blocks(rows)
    names = await find_names(context, work, blocks)
    try:
        job = await context.threads.state(partial(_queue, context, kind, work, names, num_samples))
    except TooManyJobs:
        raise Overloaded(RETRY_AFTER_S) from None
    context.runner.wake()
    headers = {"Location": f"{get_link_prefix(request.scope)}/jobs/{job.id}"}
    return Response(orjson.dumps(job_json(context, job)), 202, headers, media_type=JSON)


def _queue(
    context: Context, kind: Kind, work: RowWork[Any], names: list[str] | None, num_samples: int
) -> Job:
    settings, jobs = context.settings, Jobs(context.state)
    owner = key_name(work.call.request.scope) or ""
    client = owner or str(work.call.client)
    may_wait = partial(is_within_share, client=client, work=1, limit=settings.max_jobs)
    name, folder = jobs.new_folder()
    try:
        request = asdict(_write_files(context, work, names, num_samples, folder))
        if time.monotonic() > work.call.deadline:
            raise PastDeadline
        entry = name, kind, owner, client, request, len(work.rows) * num_samples
        return jobs.add(*entry, may_wait, settings.max_job_bytes)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _write_files(
    context: Context, work: RowWork[Any], names: list[str] | None, num_samples: int, folder: Path
) -> JobRequest:
    envelope, model, rows, stamp = work.envelope, work.loaded.model, work.rows, None
    is_inline = isinstance(rows, np.ndarray)
    if isinstance(rows, np.ndarray):
        path = f"{work.field}.npy"
        _write(folder / path, rows)
        pool = open_rows(folder / path, model.manifest.input.encoded, work.field)
    else:
        assert isinstance(rows, RowFile)
        pool = rows
        if isinstance(pool.source, Path):  # in DUBITO_POOLS
            path, stamp = str(pool.source), file_stamp(pool.source)
        else:
            path = f"{work.field}{pool.ENDING}"
            _write(folder / path, pool.source)
    if names is not None and (envelope.ids is not None or not pool.has_ids):
        _write(folder / IDS_FILE, orjson.dumps(names))
    if getattr(envelope, "groups", None) is not None:
        resolve_groups(envelope, pool.rows, model)
        _write(folder / GROUPS_FILE, orjson.dumps(envelope.groups))
    fields = request_fields(envelope, model, num_samples)
    if isinstance(envelope, AcquireRequest):
        race_stages(fields["options"])
        max_joint_candidates(fields["options"], model, pool.rows)
        excluded = _select(context, work, names, fields["seed"], folder)
        fields |= {"keep": envelope.keep, "excluded": excluded}
    else:
        fields["format"] = envelope.format
    return JobRequest(
        field=pool.field,
        path=path,
        stamp=stamp,
        rows=pool.rows,
        read_as=pool.read_as,
        ignored=pool.ignored,
        inline=is_inline,
        **fields,
    )


def _write(path: Path, content: Content | np.ndarray) -> None:
    with as_state_errors():
        write_synced(path, content)


def _select(
    context: Context, work: RowWork[Any], names: list[str] | None, seed: int, folder: Path
) -> int:
    """Write a file of the ranked and control rows, unless all are ranked. Count labelled rows."""
    if names is None:
        check_keep(work.envelope.keep, work.envelope.control, [])
        return 0
    rows = len(work.rows)
    _, selection = select_rows(context, work.envelope, work.loaded.name, names, rows, seed)
    if len(selection.ranked) < rows:
        file = io.BytesIO()
        np.savez(file, ranked=selection.ranked, control=selection.control)
        _write(folder / SELECTED_FILE, file.getvalue())
    return selection.excluded
