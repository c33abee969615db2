"""Administration routes.

Other workers detect changes to the store within `DUBITO_POLL_INTERVAL_S`. The service writes to the
store only to move `latest`.
"""

from functools import partial

from fastapi import APIRouter, Request
from pydantic import BaseModel

from model_store.artifacts.store import LATEST
from model_store.errors import NotFound
from model_store.state.jobs import Jobs
from model_store.state.labels import counts, has_state
from model_store.types import JsonObject
from service.api.jobs import JobAnswer, cancel_job, job_json
from service.api.schemas import Envelope
from service.auth.scopes import key_name, needs
from service.batch.candidate import can_fit, command, last_lines
from service.context import AllowedModels, Audit, Context, CurrentContext, CurrentRequest, ModelName
from service.errors import NotDone


class ServingAnswer(BaseModel):
    """A model's served version and the error for each broken version."""

    serving: str | None
    broken: dict[str, str]


class RefreshAnswer(BaseModel):
    """The models after a refresh."""

    models: dict[str, ServingAnswer]


class PromoteAnswer(BaseModel):
    """The promoted version, the previously served one, and the name of the key used."""

    model: str
    version: str
    before: str | None
    key: str | None


class CandidateJobAnswer(BaseModel):
    """The most recent job to fit a candidate, with the end of its log.

    `can_fit` is true if the service can run the job. `command` fits a candidate elsewhere.
    """

    model: str
    can_fit: bool
    command: str
    job: JobAnswer | None
    lines: list[str]


class DriftResetAnswer(BaseModel):
    """The result of a drift reset. `reset` is false if there were no live rows."""

    model: str
    version: str
    reset: bool


router = APIRouter(tags=["Administration"], dependencies=[needs("admin")])


@router.post("/admin/refresh", response_model=RefreshAnswer)
async def post_refresh(context: CurrentContext, allowed: AllowedModels) -> JsonObject:
    """Reread the store and list each model's served and broken versions."""
    models = context.models
    await context.threads.loads(context.watcher.refresh_now)
    content = {}
    for name in models.names(allowed):
        latest = models.latest(name)
        serving = None if latest is None else latest.version
        content[name] = {"serving": serving, "broken": models.errors(name)}
    return {"models": content}


@router.post("/admin/models/{name}/versions/{version}/promote", response_model=PromoteAnswer)
async def post_promote(
    context: CurrentContext, call: CurrentRequest, name: str, version: str, audit: Audit
) -> JsonObject:
    """Load a version, then move `latest` to it. Use this to promote or roll back."""
    models = context.models
    loaded = await context.find_model(call, Envelope(model=name, version=version))
    latest = models.latest(name)
    before = None if latest is None else latest.version

    def promote() -> None:
        models.store.set_alias(loaded.name, LATEST, loaded.version)
        audit("promote", *loaded.key, before, loaded.version)

    try:
        await context.threads.files(promote)
    except OSError as error:
        expected = "a writable store"
        raise NotDone(LATEST, expected, str(error.strerror)) from None
    await context.threads.loads(context.watcher.refresh_now)
    key = key_name(call.request.scope)
    return {"model": loaded.name, "version": loaded.version, "before": before, "key": key}


@router.get("/admin/models/{name}/candidate", response_model=CandidateJobAnswer)
async def get_candidate(context: CurrentContext, name: ModelName) -> JsonObject:
    """Return the most recent job to fit a candidate and the command for fitting one."""
    return await context.threads.state(partial(_candidate, context, name))


@router.post("/admin/models/{name}/candidate", status_code=202, response_model=CandidateJobAnswer)
async def post_candidate(
    request: Request, context: CurrentContext, name: ModelName, audit: Audit
) -> JsonObject:
    """Create a job that fits a candidate to the labels, or return the unfinished job."""
    latest = context.models.latest(name)
    if latest is None:
        raise NotFound("version", f"a served version of {name}", "none")
    if not can_fit():
        package = "the training package on the service's machine"
        expected = f"{package} (`{command(name)}` fits a candidate)"
        raise NotDone("candidate", expected, "none")

    def begin() -> JsonObject:
        jobs = Jobs(context.state)
        last = jobs.latest_candidate(name)
        if last is None or last.is_over:
            rows, owner = counts(context.state, name)["labels"], key_name(request.scope) or ""
            fit = {"model": name, "version": latest.version, "num_samples": 1, "seed": 0}
            fit |= {"rows": rows, "read_as": "labels", "ignored": []}
            job, max_bytes = jobs.new_folder()[0], context.settings.max_job_bytes
            jobs.add(job, "candidate", owner, owner, fit, 1, lambda _: True, max_bytes)
            before = None if last is None else last.state
            audit("fit candidate", name, latest.version, before, "queued", job)
        return _candidate(context, name)

    content = await context.threads.state(begin)
    context.runner.wake()
    return content


@router.delete("/admin/models/{name}/candidate", response_model=CandidateJobAnswer)
async def delete_candidate(context: CurrentContext, name: ModelName, audit: Audit) -> JsonObject:
    """Cancel the job that fits a candidate."""

    def stop() -> JsonObject:
        last = Jobs(context.state).latest_candidate(name)
        if last is not None:
            cancel_job(context, last, audit)
        return _candidate(context, name)

    content = await context.threads.state(stop)
    context.runner.wake()
    return content


def _candidate(context: Context, name: str) -> JsonObject:
    job, lines = None, []
    if has_state(context.settings.state):
        jobs = Jobs(context.state)
        last = jobs.latest_candidate(name)
        if last is not None:
            job, lines = job_json(context, last), last_lines(jobs.folder / last.id)
    return {
        "model": name,
        "can_fit": can_fit(),
        "command": command(name),
        "job": job,
        "lines": lines,
    }


@router.post("/admin/models/{name}/versions/{version}/drift/reset", response_model=DriftResetAnswer)
async def post_drift_reset(
    context: CurrentContext, name: ModelName, version: str, audit: Audit
) -> JsonObject:
    """Reset a version's drift detector in all workers."""

    def reset() -> tuple[str, bool]:
        number, report = context.models.reset_drift(name, version)
        before = None if report is None else {"rows": report.rows, "alarm": report.alarm}
        context.shared_state.reset_drift(name, number)
        audit("reset drift", name, number, before, None)
        return number, report is not None

    number, was_reset = await context.threads.files(reset)
    return {"model": name, "version": number, "reset": was_reset}
