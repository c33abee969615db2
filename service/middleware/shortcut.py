"""A shortcut to the routes that are asked most: the framework's layers in between take longer than reading a row."""

from collections.abc import Awaitable, Callable, Sequence

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from model_store.errors import DubitoError
from service.http.problems import domain_error


class Shortcut:
    """Middleware that hands POST requests of some paths straight to their routes' endpoints; the innermost."""

    def __init__(self, app: ASGIApp, routes: Sequence[Route]) -> None:
        """Begin; each route's endpoint takes a request and nothing else."""
        self.app = app
        self.routes = {route.path: route for route in routes}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or pass it on."""
        route = self.routes.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if route is None:
            await self.app(scope, receive, send)
            return
        scope["route"] = route
        request = Request(scope, receive, send)
        endpoint: Callable[[Request], Awaitable[Response]] = route.endpoint
        try:
            response = await endpoint(request)
        except DubitoError as error:
            response = domain_error(request, error)
        await response(scope, receive, send)
