"""Routes for existing jobs. `new_jobs.py` creates jobs."""

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import FileResponse
from pydantic import BaseModel

from model_store.errors import NotFound
from model_store.state.database import may_be_damaged
from model_store.state.jobs import Job, Jobs
from service.api.acquire import AcquireAnswer
from service.api.dependencies import Audit, CurrentContext, LinkPrefix
from service.api.media_types import JSON
from service.api.openapi import BINARY
from service.api.requests import NPZ, PARQUET
from service.api.responses import format_timestamp, json_response
from service.api.schemas import Timestamp
from service.auth.scopes import SCOPES_KEY, allowed_models, get_owner, needs
from service.context import Context
from service.errors import NotDone
from service.telemetry.logs import AuditLog

FILE_CONTENT: dict[str, Any] = {
    NPZ: {"schema": BINARY},
    PARQUET: {"schema": BINARY},
    "text/plain": {"schema": {"type": "string"}},
}
MEDIA_TYPES = {".json": JSON, ".npz": NPZ, ".parquet": PARQUET, ".txt": "text/plain"}


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


router = APIRouter(tags=["Jobs"], dependencies=[needs("read")])


async def _access(request: Request) -> tuple[str | None, frozenset[str] | None]:
    is_admin = "admin" in request.scope[SCOPES_KEY]
    return None if is_admin else get_owner(request.scope), allowed_models(request.scope)


# The owner and models whose jobs the request's key can use, or None for all
Access = Annotated[tuple[str | None, frozenset[str] | None], Depends(_access)]


@router.get("/jobs", response_model=JobsAnswer)
async def get_jobs(context: CurrentContext, access: Access, prefix: LinkPrefix) -> Response:
    """List the API key's jobs, latest first. Administrators see all jobs."""

    def list_jobs() -> dict[str, Any]:
        return {
            "jobs": [job_json(context, job, prefix) for job in Jobs(context.state).all(*access)]
        }

    return json_response(await context.threads.jobs(list_jobs))


async def _find_job(context: CurrentContext, access: Access, job: str) -> Job:
    return await context.threads.jobs(lambda: Jobs(context.state).get(job, *access))


OwnJob = Annotated[Job, Depends(_find_job)]  # path parameter


@router.get("/jobs/{job}", response_model=JobAnswer)
async def get_job(context: CurrentContext, prefix: LinkPrefix, job: OwnJob) -> dict[str, Any]:
    """Return the state and progress of a job."""
    return job_json(context, job, prefix)


@router.get(
    "/jobs/{job}/result",
    response_model=AcquireAnswer,
    responses={200: {"content": FILE_CONTENT}},
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


@router.post("/jobs/{job}/cancel", response_model=JobAnswer)
async def post_job_cancel(
    context: CurrentContext, prefix: LinkPrefix, job: OwnJob, audit: Audit
) -> dict[str, Any]:
    """Cancel a queued or running job."""
    cancelled = await context.threads.jobs(lambda: cancel_job(context, job, audit))
    context.runner.wake()
    return job_json(context, cancelled, prefix)


@router.delete("/jobs/{job}", response_model=JobAnswer)
async def delete_job(
    context: CurrentContext, prefix: LinkPrefix, job: OwnJob, audit: Audit
) -> dict[str, Any]:
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


def job_json(context: Context, job: Job, prefix: str = "") -> dict[str, Any]:
    """Return a job as JSON. `prefix` is the prefix for its links."""
    request, is_done = job.request, job.state == "done"
    share = 1.0 if is_done else min(1.0, job.done / job.work) if job.work else 0.0
    left = None
    if job.state == "running" and job.done > 0:
        left = job.worked_s / job.done * max(0, job.work - job.done)
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
        "expires": None
        if job.ended is None
        else format_timestamp(job.ended + context.settings.job_retention_s),
        "error": job.outcome if job.state == "failed" else None,
        "result": f"{prefix}/jobs/{job.id}/result" if is_done else None,
    }
