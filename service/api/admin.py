"""Administration: look at the store at once, take versions out of memory. The store itself is only
ever read.

What a worker is told the others do as well, within a second.
"""

from functools import partial

from fastapi import APIRouter, Request, Response

from service.api.answers import DriftResetAnswer, RefreshAnswer, UnloadAnswer
from service.api.openapi import ERRORS, PROBLEM
from service.api.responses import json_response
from service.context import context_of

router = APIRouter(tags=["Administration"])


@router.post("/admin/refresh", responses={200: {"model": RefreshAnswer}})
async def post_refresh(request: Request) -> Response:
    """Look at the store at once, broken versions included, and say what is served of each model."""
    context = context_of(request)
    models = context.models
    await context.threads.files(partial(context.shared_state.post, "refresh"))
    await context.threads.loads(context.watcher.look)
    content = {}
    for name in models.names():
        latest = models.latest(name)
        serving = None if latest is None else latest.version
        content[name] = {"serving": serving, "broken": models.broken(name)}
    return json_response({"models": content})


@router.post(
    "/admin/models/{name}/versions/{version}/unload",
    responses={200: {"model": UnloadAnswer}, 404: ERRORS[404], 409: PROBLEM},
)
async def post_unload(request: Request, name: str, version: str) -> Response:
    """Take a version out of memory, unless `latest` serves it; a request for it loads it again."""
    context = context_of(request)
    number, unloaded = await context.threads.files(partial(context.models.unload, name, version))
    await context.threads.files(partial(context.shared_state.post, "unload", name, number))
    return json_response({"model": name, "version": number, "unloaded": unloaded})


@router.post(
    "/admin/models/{name}/versions/{version}/drift/reset",
    responses={200: {"model": DriftResetAnswer}, 404: ERRORS[404]},
)
async def post_drift_reset(request: Request, name: str, version: str) -> Response:
    """Start over watching a version's rows for drift, in all workers: an alarm that was looked into
    goes."""
    context = context_of(request)
    number, reset = await context.threads.files(partial(context.models.reset_drift, name, version))
    await context.threads.files(partial(context.shared_state.post, "reset_drift", name, number))
    return json_response({"model": name, "version": number, "reset": reset})
