"""FastAPI dependencies for the routes."""

from typing import Annotated

from fastapi import Depends, Request

from model_store.errors import InvalidInput
from service.auth.scopes import allowed_models, get_owner
from service.context import Context, get_context
from service.request_context import RequestContext, get_link_prefix
from service.telemetry.logs import AuditLog


async def _context(request: Request) -> Context:
    return get_context(request)


async def _begin(request: Request) -> RequestContext:
    return get_context(request).begin(request)


async def _owner(request: Request) -> str:
    return get_owner(request.scope)


async def _allowed_models(request: Request) -> frozenset[str] | None:
    return allowed_models(request.scope)


async def _model_name(request: Request, name: str) -> str:
    return get_context(request).models.name(name, allowed_models(request.scope))


async def _audit(request: Request) -> AuditLog:
    return AuditLog(request.scope)


async def _link_prefix(request: Request) -> str:
    return get_link_prefix(request.scope)


CurrentContext = Annotated[Context, Depends(_context)]
CurrentRequest = Annotated[RequestContext, Depends(_begin)]  # subject to admission
Owner = Annotated[str, Depends(_owner)]  # name of the API key
AllowedModels = Annotated[frozenset[str] | None, Depends(_allowed_models)]  # None: all
ModelName = Annotated[str, Depends(_model_name)]  # path parameter
Audit = Annotated[AuditLog, Depends(_audit)]
LinkPrefix = Annotated[str, Depends(_link_prefix)]


async def check_query_is_read(request: Request) -> None:
    """Reject query parameters if the route does not take any."""
    route = request.scope["route"]
    reads_query = route.dependant.query_params or "parameters" in (route.openapi_extra or {})
    if request.query_params and not reads_query:
        raise InvalidInput(f"query: {next(iter(request.query_params))[:80]}", "none", "one")
