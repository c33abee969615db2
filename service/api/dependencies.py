"""FastAPI dependencies for the routes."""

from collections.abc import Callable
from typing import Annotated, Any

from fastapi import Depends, Request

from model_store.errors import InvalidInput
from service.auth.scopes import allowed_models
from service.context import Context, get_context
from service.request_context import RequestContext, get_link_prefix
from service.telemetry.logs import AuditLog


def _depends(get: Callable[[Request], Any]) -> Any:
    """Declare a parameter that is computed from the request on the event loop."""

    async def dependency(request: Request) -> Any:
        return get(request)

    return Depends(dependency)


async def _model_name(request: Request, name: str) -> str:
    return get_context(request).models.name(name, allowed_models(request.scope))


CurrentContext = Annotated[Context, _depends(get_context)]
# Subject to admission
CurrentRequest = Annotated[RequestContext, _depends(lambda r: get_context(r).begin(r))]
# None: all
AllowedModels = Annotated[frozenset[str] | None, _depends(lambda r: allowed_models(r.scope))]
ModelName = Annotated[str, Depends(_model_name)]  # path parameter
Audit = Annotated[AuditLog, _depends(lambda r: AuditLog(r.scope))]
LinkPrefix = Annotated[str, _depends(lambda r: get_link_prefix(r.scope))]


async def check_query_is_read(request: Request) -> None:
    """Reject query parameters if the route does not take any."""
    route = request.scope["route"]
    reads_query = route.dependant.query_params or "parameters" in (route.openapi_extra or {})
    if request.query_params and not reads_query:
        raise InvalidInput(f"query: {next(iter(request.query_params))[:80]}", "none", "one")
