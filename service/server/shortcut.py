"""A shortcut to the routes that are asked most: the framework's layers in between take longer than
reading a row."""

from collections.abc import Awaitable, Callable, Sequence

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from model_store.errors import DubitoError
from service.api.problems import domain_error


class Shortcut:
    """Middleware that hands POST requests of some paths straight to their routes' endpoints; the
    innermost."""

    def __init__(self, app: ASGIApp, routes: Sequence[Route]) -> None:
        """Begin; each route's endpoint takes a request, and what its path names."""
        self.app = app
        self.routes = {route.path: route for route in routes if not route.param_convertors}
        self.patterns = [route for route in routes if route.param_convertors]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or pass it on."""
        if scope["type"] != "http" or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        named: dict[str, str] = {}
        route = self.routes.get(scope["path"])
        if route is None:
            for pattern in self.patterns:
                match = pattern.path_regex.fullmatch(scope["path"])
                if match is not None:
                    route, named = pattern, match.groupdict()
                    break
        if route is None:
            await self.app(scope, receive, send)
            return
        scope["route"] = route
        request = Request(scope, receive, send)
        endpoint: Callable[..., Awaitable[Response]] = route.endpoint
        try:
            response = await endpoint(request, **named)
        except DubitoError as error:
            response = domain_error(request, error)
        await response(scope, receive, send)
