"""Routes for health checks and metrics."""

from typing import Literal

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel

from model_store.types import JsonObject
from service.auth.scopes import OPEN_TO_ALL, SCOPES_KEY, allowed_models, needs
from service.context import Context, CurrentContext
from service.errors import NotReady, ShuttingDown
from service.models.models import HOW_TO_PUBLISH

PREFLIGHTS_RUNNING = "the service is still checking the versions to serve"


class StatusAnswer(BaseModel):
    """The liveness status."""

    status: Literal["live"]


class ReadyAnswer(BaseModel):
    """The readiness status, which is `degraded` if an alias cannot serve its version.

    If API keys are configured, only requests with a key get the other fields.
    """

    status: Literal["ready", "degraded"]
    models: dict[str, str] | None = None
    degraded: list[str] | None = None


router = APIRouter(tags=["Health"])


@router.get("/health/live", response_model=StatusAnswer, dependencies=[OPEN_TO_ALL])
async def get_live() -> dict[str, str]:
    """Check that the process is running."""
    return {"status": "live"}


@router.get(
    "/health/ready",
    response_model=ReadyAnswer,
    response_model_exclude_unset=True,
    dependencies=[OPEN_TO_ALL],
)
async def get_ready(request: Request, context: CurrentContext) -> JsonObject:
    """Check that models can predict and that each alias serves its version.

    If API keys are configured, only requests with a valid key see model names.
    """
    shows_names = bool(request.scope[SCOPES_KEY]) and allowed_models(request.scope) is None
    serving = check_ready(context, shows_names)
    problems = context.watcher.all_problems()
    answer: JsonObject = {"status": "degraded" if problems else "ready"}
    if shows_names:
        answer |= {"models": serving} | ({"degraded": problems} if problems else {})
    return answer


def check_ready(context: Context, shows_reasons: bool = False) -> dict[str, str]:
    """Return each model's served version if every expected model is served."""
    if context.ending.is_set():
        raise ShuttingDown
    serving = context.served_versions()
    if not serving:
        problems = context.watcher.all_problems() if shows_reasons else ()
        reason = PREFLIGHTS_RUNNING if context.watcher.has_pending_preflights else HOW_TO_PUBLISH
        raise NotReady("; ".join(problems) or reason)
    missing = context.missing_models(serving)
    if missing:
        names = f": {', '.join(missing)}" if shows_reasons else ""
        raise NotReady(f"models of DUBITO_MODELS are not served yet{names}")
    return serving


@router.get(
    "/metrics",
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
    response_class=Response,
    dependencies=[needs("metrics")],
)
async def get_metrics(context: CurrentContext) -> Response:
    """Return metrics for Prometheus."""
    shared = context.shared_state
    is_local = shared.backend is None
    page = shared.metrics() if is_local else await context.threads.files(shared.metrics)
    return Response(page, media_type=CONTENT_TYPE_LATEST)
