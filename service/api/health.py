"""`GET /health/live`, `GET /health/ready` and `GET /metrics`."""

from typing import Any

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

from service.api.answers import ReadyAnswer, StatusAnswer
from service.api.openapi import PROBLEM
from service.auth import auth
from service.context import Context, context_of
from service.errors import NotReady
from service.models.models import HOW_TO_PUBLISH

BEING_TRIED = "the versions to be served are being tried"

router = APIRouter(tags=["Health"])


@router.get("/health/live", response_model=StatusAnswer)
async def get_live() -> dict[str, str]:
    """Say that the process answers."""
    return {"status": "live"}


@router.get(
    "/health/ready",
    response_model=ReadyAnswer,
    response_model_exclude_unset=True,
    responses={503: PROBLEM},
)
async def get_ready(request: Request) -> dict[str, Any]:
    """Say whether there is a model to predict with, and whether each alias serves what it names; to
    those who may ask models which."""
    context = context_of(request)
    may_see_names = auth.may_see_names(request.scope, context.key_ring.keys)
    serving = refuse_unready(context, may_see_names)
    troubles = [*context.watcher.troubles.values()]
    answer: dict[str, Any] = {"status": "degraded" if troubles else "ready"}
    if may_see_names:
        answer |= {"models": serving} | ({"degraded": troubles} if troubles else {})
    return answer


def refuse_unready(context: Context, is_told_why: bool = False) -> dict[str, str]:
    """Return what is served, version by model."""
    models = context.models
    if context.ending.is_set():
        raise NotReady("the service is about to end")
    serving = context.served_versions()
    if not serving:
        broken = [text for name in models.names() for text in models.broken(name).values()]
        otherwise = BEING_TRIED if context.watcher.awaits_preflights else HOW_TO_PUBLISH
        raise NotReady("; ".join(broken if is_told_why else ()) or otherwise)
    return serving


@router.get(
    "/metrics",
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
    response_class=Response,
)
async def get_metrics(request: Request) -> Response:
    """Give metrics for Prometheus."""
    context = context_of(request)
    shared = context.shared_state
    alone = shared.backend is None
    page = shared.metrics() if alone else await context.threads.files(shared.metrics)
    return Response(page, media_type=CONTENT_TYPE_LATEST)
