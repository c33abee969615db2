"""Administration: look at the store at once, take versions out of memory, fit candidates, move
`latest`, which alone the service writes to the store.

What a worker is told the others do as well, within a second.
"""

from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response

from model_store.artifacts.store import LATEST
from model_store.errors import NotFound
from model_store.state.jobs import Jobs
from model_store.state.labels import counts, has_state
from service.api.answers import (
    CandidateJobAnswer,
    DriftResetAnswer,
    PromoteAnswer,
    RefreshAnswer,
    UnloadAnswer,
)
from service.api.jobs import job_json
from service.api.openapi import answers
from service.api.responses import json_response
from service.api.schemas import Envelope
from service.auth.keys import owner_of
from service.batch.candidate import can_fit, command, last_lines
from service.context import Context, context_of
from service.errors import NotDone

router = APIRouter(tags=["Administration"])
OF_CANDIDATES = answers(CandidateJobAnswer, 404, 503)


@router.post("/admin/refresh", responses=answers(RefreshAnswer))
async def post_refresh(request: Request) -> Response:
    """Look at the store at once, broken versions included, and say what is served of each model."""
    context = context_of(request)
    models = context.models
    await _refresh(context)
    content = {}
    for name in models.names():
        latest = models.latest(name)
        serving = None if latest is None else latest.version
        content[name] = {"serving": serving, "broken": models.broken(name)}
    return json_response({"models": content})


async def _refresh(context: Context) -> None:
    await context.threads.files(partial(context.shared_state.post, "refresh"))
    await context.threads.loads(context.watcher.look)


@router.post(
    "/admin/models/{name}/versions/{version}/promote",
    responses=answers(PromoteAnswer, 404, 409, 503),
)
async def post_promote(request: Request, name: str, version: str) -> Response:
    """Have `latest` name a version, once that was loaded: a promotion, or a roll-back."""
    context = context_of(request)
    models, call = context.models, context.begin(request)
    served = await context.find_model(call, Envelope(model=name, version=version))
    before = models.latest(name)
    try:
        move = partial(models.store.set_alias, served.name, LATEST, served.version)
        await context.threads.files(move)
    except OSError as error:
        expected = "a store that the service may write to"
        raise NotDone(LATEST, expected, f"one it may not: {error.strerror}") from None
    await _refresh(context)
    content = {"model": served.name, "version": served.version}
    return json_response(content | {"before": None if before is None else before.version})


@router.get("/admin/models/{name}/candidate", responses=OF_CANDIDATES)
async def get_candidate(request: Request, name: str) -> Response:
    """Say whether a candidate can be fitted here, by which command elsewhere, and how far the last
    job that does so is."""
    context = context_of(request)
    name = context.models.name(name)
    content = await context.threads.state(partial(_candidate, context, name))
    return json_response(content)


@router.post(
    "/admin/models/{name}/candidate",
    status_code=202,
    responses=answers(CandidateJobAnswer, 404, 409, 503, 507, status=202),
)
async def post_candidate(request: Request, name: str) -> Response:
    """Fit a candidate of the labels that there are, as a job; the one that is not over, if there
    is one."""
    context = context_of(request)
    name, owner = context.models.name(name), owner_of(request.scope)
    latest = context.models.latest(name)
    if latest is None:
        raise NotFound("version", f"one of {name} that is served", "none")
    if not can_fit():
        expected = (
            f"training to be installed where the service runs (`{command(name)}` fits it there)"
        )
        raise NotDone("candidate", expected, "none")

    def begin() -> dict[str, Any]:
        jobs = Jobs(context.state)
        last = jobs.latest_candidate(name)
        if last is None or last.is_over:
            asked = {"model": name, "version": latest.version, "num_samples": 1, "seed": 0}
            asked |= {"rows": counts(context.state, name)["labels"]}
            asked |= {"read_as": "labels", "ignored": []}
            folder, most = jobs.new_folder()[0], context.settings.max_job_bytes
            jobs.add(folder, "candidate", owner, owner, asked, 1, lambda _: True, most)
        return _candidate(context, name)

    content = await context.threads.state(begin)
    context.runner.wake()
    return json_response(content, 202)


@router.delete("/admin/models/{name}/candidate", responses=OF_CANDIDATES)
async def delete_candidate(request: Request, name: str) -> Response:
    """Stop fitting a candidate."""
    context = context_of(request)
    name = context.models.name(name)

    def stop() -> dict[str, Any]:
        jobs = Jobs(context.state)
        last = jobs.latest_candidate(name)
        if last is not None:
            jobs.cancel(last.id)
        return _candidate(context, name)

    content = await context.threads.state(stop)
    context.runner.wake()
    return json_response(content)


def _candidate(context: Context, name: str) -> dict[str, Any]:
    job, lines = None, []
    if has_state(context.settings.state):  # so that looking makes none
        jobs = Jobs(context.state)
        last = jobs.latest_candidate(name)
        if last is not None:
            job, lines = job_json(context, last), last_lines(jobs.folder / last.id)
    told = {"can_fit": can_fit(), "command": command(name)}
    return {"model": name, **told, "job": job, "lines": lines}


@router.post(
    "/admin/models/{name}/versions/{version}/unload",
    responses=answers(UnloadAnswer, 404, 409),
)
async def post_unload(request: Request, name: str, version: str) -> Response:
    """Take a version out of memory, unless `latest` serves it; a request for it loads it again."""
    context = context_of(request)
    number, unloaded = await context.threads.files(partial(context.models.unload, name, version))
    await context.threads.files(partial(context.shared_state.post, "unload", name, number))
    return json_response({"model": name, "version": number, "unloaded": unloaded})


@router.post(
    "/admin/models/{name}/versions/{version}/drift/reset",
    responses=answers(DriftResetAnswer, 404),
)
async def post_drift_reset(request: Request, name: str, version: str) -> Response:
    """Start over watching a version's rows for drift, in all workers: an alarm that was looked into
    goes."""
    context = context_of(request)
    number, reset = await context.threads.files(partial(context.models.reset_drift, name, version))
    await context.threads.files(partial(context.shared_state.post, "reset_drift", name, number))
    return json_response({"model": name, "version": number, "reset": reset})
