"""`POST /acquire/jobs`, `POST /predict/jobs` and `/jobs`: work on whole pools in the background."""

import io
import os
import shutil
import sqlite3
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import orjson
from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import FileResponse

from model_store.acquisition.choice import most_candidates
from model_store.acquisition.ranking import race_stages
from model_store.errors import InvalidInput, NotFound
from model_store.sources.files import open_rows, stamp_of
from model_store.sources.row_file import RowFile
from model_store.state.answers import Repeatable, Repeated
from model_store.state.database import as_state_errors, may_be_damaged
from model_store.state.jobs import Job, Jobs, Kind, TooManyJobs
from service import limits
from service.api.acquire import find_names, select_rows
from service.api.dependencies import CurrentContext, LinkPrefix, Owner
from service.api.idempotency import repeatable
from service.api.media_types import JSON
from service.api.openapi import BINARY, ROW_ERRORS, answers, errors, request_body
from service.api.options import groups_of, num_samples_of
from service.api.pool_files import open_rows_file
from service.api.requests import (
    ENDINGS,
    NPZ,
    PARQUET,
    count_rows,
    read_body,
    read_rows,
    row_numbers,
)
from service.api.responses import json_response, moment
from service.api.schemas import (
    AcquireAnswer,
    AcquireRequest,
    Envelope,
    JobAnswer,
    JobsAnswer,
    JobsQuery,
    PredictJobRequest,
)
from service.auth.scopes import needs, owner_of
from service.batch.computation import request_fields
from service.batch.job_process import GROUPS_FILE, IDS_FILE, SELECTED_FILE, JobRequest
from service.call import Call, prefix_of
from service.context import Context
from service.engine.pool_ranking import check_keeping
from service.errors import NotDone, Overloaded, PastDeadline, TooLarge
from service.models.models import Served
from service.models.reservoir import fresh_seed
from service.server.shares import is_within_share

RETRY_AFTER_S = 60  # where too many jobs are queued

MEDIA_TYPES = {".json": JSON, ".npz": NPZ, ".parquet": PARQUET, ".txt": "text/plain"}

router = APIRouter(tags=["Jobs"])


@router.post(
    "/acquire/jobs",
    status_code=202,
    response_model=JobAnswer,
    responses=ROW_ERRORS | errors(507),
    openapi_extra=request_body(AcquireRequest),
    dependencies=[needs("acquire")],
)
async def post_acquire_job(request: Request, context: CurrentContext) -> Response:
    """Rank a pool of any size as /acquire does; answers with the id of a job."""
    return await _accept(request, context, "acquire", AcquireRequest, "pool")


@router.post(
    "/predict/jobs",
    status_code=202,
    response_model=JobAnswer,
    responses=ROW_ERRORS | errors(507),
    openapi_extra=request_body(PredictJobRequest),
    dependencies=[needs("predict")],
)
async def post_predict_job(request: Request, context: CurrentContext) -> Response:
    """Predict the rows of a file of any size as /predict does; answers with the id of a job."""
    return await _accept(request, context, "predict", PredictJobRequest, "inputs")


@router.get("/jobs", response_model=JobsAnswer, responses=errors(422), dependencies=[needs("read")])
async def get_jobs(
    context: CurrentContext,
    owner: Owner,
    prefix: LinkPrefix,
    query: Annotated[JobsQuery, Query()],
) -> Response:
    """List the jobs of the request's key, the latest first."""

    def listed() -> dict[str, Any]:
        jobs, more = Jobs(context.state).part_of(owner, query.limit, query.after)
        content = {"jobs": [job_json(context, job, prefix) for job in jobs]}
        return content if query.limit is None else {**content, "next": more}

    return json_response(await context.threads.ask(listed))


async def _find_job(context: CurrentContext, owner: Owner, job: str) -> Job:
    return await context.threads.ask(lambda: Jobs(context.state).get(job, owner))


OwnJob = Annotated[Job, Depends(_find_job)]  # that the path names


@router.get(
    "/jobs/{job}",
    response_model=JobAnswer,
    responses=errors(404),
    dependencies=[needs("read")],
)
async def get_job(context: CurrentContext, prefix: LinkPrefix, job: OwnJob) -> dict[str, Any]:
    """Report the progress of a job."""
    return job_json(context, job, prefix)


@router.get(
    "/jobs/{job}/result",
    responses=answers(
        AcquireAnswer,
        *(404, 409),
        content={
            NPZ: {"schema": BINARY},
            PARQUET: {"schema": BINARY},
            "text/plain": {"schema": {"type": "string"}},
        },
    ),
    dependencies=[needs("read")],
)
async def get_job_result(context: CurrentContext, job: OwnJob) -> Response:
    """Return a job's result: an answer of /acquire, a table of predictions or the log of a fit."""
    if job.state != "done":
        reason = f": {job.outcome}" if job.state == "failed" else ""
        raise NotDone("job", "one that is done", f"one that is {job.state}{reason}")
    with may_be_damaged(f"job {job.id}"):
        path = Jobs(context.state).folder / job.id / job.outcome
        media_type = MEDIA_TYPES[path.suffix]
    if not path.exists():
        raise NotFound("job", "one whose result is kept", "one whose file is lost")
    return FileResponse(path, media_type=media_type, filename=f"{job.id}{path.suffix}")


@router.post(
    "/jobs/{job}/cancel",
    response_model=JobAnswer,
    responses=ROW_ERRORS,
    dependencies=[needs("read")],
)
async def post_job_cancel(
    context: CurrentContext, prefix: LinkPrefix, job: OwnJob
) -> dict[str, Any]:
    """Cancel a job: at once if it is queued, soon if it runs. One that is over stays as it is."""
    cancelled = await context.threads.ask(lambda: Jobs(context.state).cancel(job.id))
    context.runner.wake()
    return job_json(context, cancelled, prefix)


@router.delete(
    "/jobs/{job}",
    response_model=JobAnswer,
    responses=errors(404, 409),
    dependencies=[needs("read")],
)
async def delete_job(context: CurrentContext, prefix: LinkPrefix, job: OwnJob) -> dict[str, Any]:
    """Delete a job that is over, with its result."""
    if not job.is_over:
        expected = "one that is over (POST /jobs/{job}/cancel ends it)"
        raise NotDone("job", expected, f"one {job.state}")
    await context.threads.ask(lambda: Jobs(context.state).forget(job.id))
    return job_json(context, job, prefix)


async def _accept(
    request: Request, context: Context, kind: Kind, envelope_kind: type[Any], field: str
) -> Response:
    """Check a request for a job as far as can be done without computing, and queue it."""
    owner = owner_of(request.scope)
    settings, call = context.settings, Call.of(request, context.settings.deadline_s)
    body = await read_body(call, settings.max_body_bytes)
    call.begun = time.monotonic()  # the body of a job may take long to come
    call.deadline = call.begun + settings.deadline_s
    try:
        asked = await repeatable(context, call, body)
        job = await _queue(context, call, (kind, owner), envelope_kind, field, body, asked)
        answer = orjson.dumps(job_json(context, job))
    except Repeated as again:
        answer = again.answer
    headers = {"Location": f"{prefix_of(request.scope)}/jobs/{orjson.loads(answer)['id']}"}
    return Response(answer, 202, headers, media_type=JSON)


async def _queue(
    context: Context,
    call: Call,
    of: tuple[Kind, str],
    envelope_kind: type[Any],
    field: str,
    body: bytes | bytearray,
    repeated: Repeatable | None,
) -> Job:
    (kind, owner), settings = of, context.settings
    most = settings.max_pool_rows
    envelope, inline = await read_rows(context, call, body, envelope_kind, field, most, ENDINGS)
    _refuse_options(envelope)
    served = await context.find_model(call, envelope)
    rows: RowFile | np.ndarray
    if inline is None:
        rows = await open_rows_file(context, call, body, envelope, served, field)
    else:
        rows = await row_numbers(context, call, inline, served, field, envelope.encoded)
    del inline  # which may be many times as large as the numbers
    num_samples = num_samples_of(envelope, served, settings)
    work = count_rows(rows) * num_samples
    if work > limits.MAX_JOB_ROW_DRAWS:
        expected = f"at most {limits.MAX_JOB_ROW_DRAWS} of a job"
        raise TooLarge("rows x num_samples", expected, str(work))
    names = await find_names(context, call, envelope, rows)
    client = owner or str(call.client)

    def may_wait(queued: Mapping[str, int]) -> bool:
        return is_within_share(queued, client, 1, settings.max_jobs)

    def note(connection: sqlite3.Connection, job: Job) -> None:
        if repeated is not None:
            repeated.keep(connection, orjson.dumps(job_json(context, job)))

    def queue() -> Job:
        jobs = Jobs(context.state)
        name, folder = jobs.new_folder()
        try:
            wanted = _job_request(
                context, envelope, served, field, rows, names, num_samples, folder
            )
            if time.monotonic() > call.deadline:
                raise PastDeadline
            asked = name, kind, owner, client, asdict(wanted), work
            return jobs.add(*asked, may_wait, settings.max_job_bytes, note)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    try:
        job = await context.threads.state(queue)
    except TooManyJobs:
        raise Overloaded(RETRY_AFTER_S) from None
    context.runner.wake()
    return job


def _refuse_options(envelope: Envelope) -> None:
    for name in ("deadline_s", "return_samples", "explain"):
        if getattr(envelope, name, None):
            raise InvalidInput(name, "none of a job", "one")


def _job_request(
    context: Context,
    envelope: Any,
    served: Served,
    field: str,
    rows: RowFile | np.ndarray,
    names: list[str] | None,
    num_samples: int,
    folder: Path,
) -> JobRequest:
    """Return what a job is to do; rows that came with the request are written to its folder."""
    stamp = None
    if isinstance(rows, np.ndarray):
        path = f"{field}.npy"
        _write(folder / path, rows)
        pool = open_rows(folder / path, served.model.manifest.input.encoded, field)
    elif isinstance(rows.source, Path):  # in the operator's folder
        pool, path, stamp = rows, str(rows.source), stamp_of(rows.source)
    else:
        pool, path = rows, f"{field}{rows.ENDING}"
        _write(folder / path, rows.source)
    if envelope.ids is not None:
        _write(folder / IDS_FILE, orjson.dumps(envelope.ids))
    if getattr(envelope, "groups", None) is not None:
        groups_of(envelope, pool.rows, served)
        _write(folder / GROUPS_FILE, orjson.dumps(envelope.groups))
    seed = fresh_seed() if envelope.seed is None else envelope.seed
    fields = request_fields(envelope, served, num_samples)
    if isinstance(envelope, AcquireRequest):
        selected, excluded = False, 0
        if names is None:
            check_keeping(envelope.keep, envelope.control, [], are_named=False)
        else:
            selection = select_rows(context, envelope, served.name, names, True, seed)
            selected, excluded = len(selection.ranked) < pool.rows, selection.excluded
        if selected:
            file = io.BytesIO()
            np.savez(file, ranked=selection.ranked, control=selection.control)
            _write(folder / SELECTED_FILE, file.getvalue())
        race_stages(envelope.race, fields["acquisition"], served.model.manifest.task, num_samples)
        most_candidates(fields["acquisition"], served.model, pool.rows, envelope.k, num_samples)
        fields |= {"race": envelope.race, "keep": envelope.keep}
        fields |= {"selected": selected, "excluded": excluded}
    else:
        fields["format"] = envelope.format
    return JobRequest(
        model=served.name,
        version=served.version,
        num_samples=num_samples,
        seed=seed,
        field=pool.field,
        path=path,
        stamp=stamp,
        rows=pool.rows,
        read_as=pool.read_as,
        ignored=pool.ignored,
        encoded=envelope.encoded or isinstance(rows, np.ndarray),
        **fields,
    )


def _write(path: Path, content: bytes | bytearray | np.ndarray) -> None:
    with as_state_errors(), path.open("wb") as file:
        if isinstance(content, np.ndarray):
            np.save(file, content, allow_pickle=False)
        else:
            file.write(content)
        file.flush()
        os.fsync(file.fileno())


def job_json(context: Context, job: Job, prefix: str = "") -> dict[str, Any]:
    """Return the answer about a job; `prefix` is the start of links."""
    request, is_done = job.request, job.state == "done"
    share = 1.0 if is_done else min(1.0, job.done / job.work) if job.work else 0.0
    left = None
    if job.state == "running" and job.done > 0:
        left = job.worked_s / job.done * max(0, job.work - job.done)
    with may_be_damaged(f"job {job.id}"):
        asked = ("model", "version", "rows", "num_samples", "seed", "read_as")
        numbers = {name: request[name] for name in asked} | {"ignored_columns": request["ignored"]}
    return {
        "id": job.id,
        "kind": job.kind,
        "state": job.state,
        **numbers,
        "progress": share,
        "worked_s": job.worked_s,
        "seconds_left": left,
        "created": moment(job.created),
        "begun": moment(job.begun),
        "ended": moment(job.ended),
        "expires": None
        if job.ended is None
        else moment(job.ended + context.settings.job_retention_s),
        "error": job.outcome if job.state == "failed" else None,
        "result": f"{prefix}/jobs/{job.id}/result" if is_done else None,
    }
