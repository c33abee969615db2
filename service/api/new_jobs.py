"""Routes that create jobs."""

import io
import os
import shutil
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from fastapi import APIRouter, Request, Response

from model_store.acquisition.choice import max_joint_candidates
from model_store.acquisition.ranking import race_stages
from model_store.errors import InvalidInput
from model_store.sources.files import file_stamp, open_rows
from model_store.sources.row_file import RowFile
from model_store.state.database import as_state_errors
from model_store.state.jobs import Job, Jobs, Kind, TooManyJobs
from model_store.types import Content
from service import limits
from service.api.acquire import ID_BYTES, find_names, select_rows
from service.api.dependencies import CurrentContext
from service.api.jobs import JobAnswer, job_json
from service.api.media_types import JSON
from service.api.openapi import request_body
from service.api.options import resolve_groups, resolve_num_samples
from service.api.predict import RowWork, read_work, to_numbers
from service.api.rows import file_parts, name_rows
from service.api.schemas import AcquireRequest, PredictJobRequest
from service.auth.scopes import get_owner, needs
from service.batch.computation import request_fields
from service.batch.job_process import GROUPS_FILE, IDS_FILE, SELECTED_FILE, JobRequest
from service.context import Context
from service.engine.pool_ranking import check_keep
from service.errors import Overloaded, PastDeadline, TooLarge
from service.models.reservoir import fresh_seed
from service.request_context import RequestContext, get_link_prefix
from service.server.shares import is_within_share

RETRY_AFTER_S = 60  # if too many jobs are queued

router = APIRouter(tags=["Jobs"])


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
    """Validate a request without running the model, then queue its job."""
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
    names = await find_names(context, work)
    if names is None and getattr(work.envelope, "keep", False):
        rows, model = work.rows, work.loaded.model
        parts: Iterable[np.ndarray] = (
            file_parts(rows, call, model.text_encoder)
            if isinstance(rows, RowFile)
            else [np.asarray(rows)]
        )
        make_names = partial(name_rows, parts, model.manifest.input, call)
        names = await context.threads.requests.run(call, ID_BYTES * len(rows), make_names)
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
    """Write a job's files and add the job to the queue.

    Raises:
        TooManyJobs: if the queue is full and the client has used its share.
        OverQuota: if the files of the key's jobs take too much space.
    """
    settings, jobs = context.settings, Jobs(context.state)
    owner = get_owner(work.call.request.scope)
    client = owner or str(work.call.client)

    def may_wait(queued: Mapping[str, int]) -> bool:
        return is_within_share(queued, client, 1, settings.max_jobs)

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
    """Write the request's rows, ids and groups to the job's folder."""
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
    seed = fresh_seed() if envelope.seed is None else envelope.seed
    fields = request_fields(envelope, model, num_samples)
    if isinstance(envelope, AcquireRequest):
        race_stages(envelope.race, fields["acquisition"], model.manifest.task, num_samples)
        max_joint_candidates(fields["acquisition"], model, pool.rows, envelope.k, num_samples)
        excluded = _select(context, work, names, seed, folder)
        fields |= {"race": envelope.race, "keep": envelope.keep, "excluded": excluded}
    else:
        fields["format"] = envelope.format
    return JobRequest(
        model=work.loaded.name,
        version=work.loaded.version,
        num_samples=num_samples,
        seed=seed,
        field=pool.field,
        path=path,
        stamp=stamp,
        rows=pool.rows,
        read_as=pool.read_as,
        ignored=pool.ignored,
        encoded=envelope.encoded or is_inline,
        inline=is_inline,
        **fields,
    )


def _select(
    context: Context, work: RowWork[Any], names: list[str] | None, seed: int, folder: Path
) -> int:
    """Write a file that selects the rows to rank and the control rows.

    If all rows are ranked, no file is written.

    Return the number of rows that already have labels.
    """
    if names is None:
        check_keep(work.envelope.keep, work.envelope.control, [])
        return 0
    selection = select_rows(context, work.envelope, work.loaded.name, names, True, seed)
    if len(selection.ranked) < len(work.rows):
        file = io.BytesIO()
        np.savez(file, ranked=selection.ranked, control=selection.control)
        _write(folder / SELECTED_FILE, file.getvalue())
    return selection.excluded


def _write(path: Path, content: Content | np.ndarray) -> None:
    with as_state_errors(), path.open("wb") as file:
        if isinstance(content, np.ndarray):
            np.save(file, content, allow_pickle=False)
        else:
            file.write(content)
        file.flush()
        os.fsync(file.fileno())
