"""Routes that create jobs."""

import io
import os
import shutil
import sqlite3
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
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
from model_store.state.answers import Repeatable, Repeated
from model_store.state.database import as_state_errors
from model_store.state.jobs import Job, Jobs, Kind, TooManyJobs
from model_store.types import Content
from service import limits
from service.api.acquire import find_names, select_rows
from service.api.dependencies import CurrentContext
from service.api.idempotency import identify_request
from service.api.jobs import job_json
from service.api.media_types import JSON
from service.api.openapi import ROW_ERRORS, errors, request_body
from service.api.options import resolve_groups, resolve_num_samples
from service.api.pool_files import open_rows_file
from service.api.requests import ENDINGS, read_body, read_rows, to_numbers
from service.api.schemas import AcquireRequest, JobAnswer, PredictJobRequest
from service.auth.scopes import get_owner, needs
from service.batch.computation import request_fields
from service.batch.job_process import GROUPS_FILE, IDS_FILE, SELECTED_FILE, JobRequest
from service.context import Context
from service.engine.pool_ranking import check_keep
from service.errors import Overloaded, PastDeadline, TooLarge
from service.models.models import ServedModel
from service.models.reservoir import fresh_seed
from service.request_context import RequestContext, get_link_prefix
from service.server.shares import is_within_share

RETRY_AFTER_S = 60  # if too many jobs are queued

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
    """Create a job that ranks a pool like /acquire."""
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
    """Create a job that predicts a file of rows like /predict."""
    return await _accept(request, context, "predict", PredictJobRequest, "inputs")


async def _accept(
    request: Request, context: Context, kind: Kind, envelope_kind: type[Any], field: str
) -> Response:
    settings = context.settings
    call = RequestContext.from_request(request, settings.deadline_s)
    body = await read_body(call, settings.max_body_bytes)
    call.started = time.monotonic()  # excludes the upload, which can take long
    call.deadline = call.started + settings.deadline_s
    try:
        repeat = await identify_request(context, call, body)
        new_job = await _check(context, call, kind, body, envelope_kind, field)
        try:
            job = await context.threads.state(lambda: new_job.queue(repeat))
        except TooManyJobs:
            raise Overloaded(RETRY_AFTER_S) from None
        context.runner.wake()
        answer = orjson.dumps(job_json(context, job))
    except Repeated as repeated:
        answer = repeated.answer
    headers = {"Location": f"{get_link_prefix(request.scope)}/jobs/{orjson.loads(answer)['id']}"}
    return Response(answer, 202, headers, media_type=JSON)


async def _check(
    context: Context,
    call: RequestContext,
    kind: Kind,
    body: Content,
    envelope_kind: type[Any],
    field: str,
) -> "NewJob":
    """Validate a request for a job without running the model."""
    max_rows = context.settings.max_pool_rows
    envelope, inline = await read_rows(context, call, body, envelope_kind, field, max_rows, ENDINGS)
    for name in ("deadline_s", "return_samples", "explain"):
        if getattr(envelope, name, None):
            raise InvalidInput(name, "no value for a job", "one")
    loaded = await context.find_model(call, envelope)
    rows: RowFile | np.ndarray
    if inline is None:
        rows = await open_rows_file(context, call, body, envelope, loaded, field)
    else:
        rows = await to_numbers(context, call, inline, loaded, field, envelope)
    del inline  # can be much larger than the numbers
    num_samples = resolve_num_samples(envelope, loaded, context.settings)
    if len(rows) * num_samples > limits.MAX_JOB_ROW_DRAWS:
        expected = f"at most {limits.MAX_JOB_ROW_DRAWS} per job"
        raise TooLarge("rows x num_samples", expected, str(len(rows) * num_samples))
    names = await find_names(context, call, envelope, rows)
    return NewJob(context, call, kind, envelope, loaded, field, rows, names, num_samples)


@dataclass(frozen=True, eq=False)
class NewJob:
    """A valid request for a job. Its methods write files, so call them from a worker thread."""

    context: Context
    call: RequestContext
    kind: Kind
    envelope: Any
    loaded: ServedModel
    field: str  # name of the rows
    rows: RowFile | np.ndarray
    names: list[str] | None
    num_samples: int

    def queue(self, repeat: Repeatable | None) -> Job:
        """Store the job, and its response in case the request is repeated.

        Raises:
            TooManyJobs: if the queue is full and the client has used its share.
            OverQuota: if the files of the key's jobs take too much space.
        """
        settings, jobs = self.context.settings, Jobs(self.context.state)
        owner = get_owner(self.call.request.scope)
        client = owner or str(self.call.client)

        def may_wait(queued: Mapping[str, int]) -> bool:
            return is_within_share(queued, client, 1, settings.max_jobs)

        def keep_answer(connection: sqlite3.Connection, job: Job) -> None:
            if repeat is not None:
                repeat.save(connection, orjson.dumps(job_json(self.context, job)))

        name, folder = jobs.new_folder()
        try:
            request = asdict(self.write_files(folder))
            if time.monotonic() > self.call.deadline:
                raise PastDeadline
            work = len(self.rows) * self.num_samples
            entry = name, self.kind, owner, client, request, work
            return jobs.add(*entry, may_wait, settings.max_job_bytes, keep_answer)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    def write_files(self, folder: Path) -> JobRequest:
        """Write the request's rows, ids and groups to the job's folder."""
        envelope, loaded, stamp = self.envelope, self.loaded, None
        if isinstance(self.rows, np.ndarray):
            path = f"{self.field}.npy"
            _write(folder / path, self.rows)
            pool = open_rows(folder / path, loaded.model.manifest.input.encoded, self.field)
        elif isinstance(self.rows.source, Path):  # in DUBITO_POOLS
            pool, path, stamp = self.rows, str(self.rows.source), file_stamp(self.rows.source)
        else:
            pool, path = self.rows, f"{self.field}{self.rows.ENDING}"
            _write(folder / path, self.rows.source)
        if envelope.ids is not None:
            _write(folder / IDS_FILE, orjson.dumps(envelope.ids))
        if getattr(envelope, "groups", None) is not None:
            resolve_groups(envelope, pool.rows, loaded)
            _write(folder / GROUPS_FILE, orjson.dumps(envelope.groups))
        seed = fresh_seed() if envelope.seed is None else envelope.seed
        fields = request_fields(envelope, loaded, self.num_samples)
        if isinstance(envelope, AcquireRequest):
            fields |= self._select(envelope, pool, seed, fields["acquisition"], folder)
        else:
            fields["format"] = envelope.format
        return JobRequest(
            model=loaded.name,
            version=loaded.version,
            num_samples=self.num_samples,
            seed=seed,
            field=pool.field,
            path=path,
            stamp=stamp,
            rows=pool.rows,
            read_as=pool.read_as,
            ignored=pool.ignored,
            encoded=envelope.encoded or isinstance(self.rows, np.ndarray),
            inline=isinstance(self.rows, np.ndarray),
            **fields,
        )

    def _select(
        self, envelope: AcquireRequest, pool: RowFile, seed: int, acquisition: str, folder: Path
    ) -> dict[str, Any]:
        """Select the rows to rank and the control rows, and return the job's fields."""
        excluded = 0
        if self.names is None:
            check_keep(envelope.keep, envelope.control, [], has_ids=False)
        else:
            selection = select_rows(
                self.context, envelope, self.loaded.name, self.names, True, seed
            )
            excluded = selection.excluded
            if len(selection.ranked) < pool.rows:
                file = io.BytesIO()
                np.savez(file, ranked=selection.ranked, control=selection.control)
                _write(folder / SELECTED_FILE, file.getvalue())
        model, num_samples = self.loaded.model, self.num_samples
        race_stages(envelope.race, acquisition, model.manifest.task, num_samples)
        max_joint_candidates(acquisition, model, pool.rows, envelope.k, num_samples)
        return {"race": envelope.race, "keep": envelope.keep, "excluded": excluded}


def _write(path: Path, content: Content | np.ndarray) -> None:
    with as_state_errors(), path.open("wb") as file:
        if isinstance(content, np.ndarray):
            np.save(file, content, allow_pickle=False)
        else:
            file.write(content)
        file.flush()
        os.fsync(file.fileno())
