"""The application: what the routes share, the routes, and what every request passes."""

import gc
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import Depends, FastAPI
from fastapi.routing import APIRoute
from fastapi_offline import FastAPIOffline
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.gzip import DEFAULT_EXCLUDED_CONTENT_TYPES, GZipMiddleware
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from model_store.errors import DubitoError
from model_store.inference.preflight_process import PreflightProcess
from model_store.inference.sessions import bound_memory
from service import VERSION, limits
from service.api import (
    acquire,
    admin,
    examples,
    health,
    jobs,
    labels,
    models,
    new_jobs,
    page,
    pool_files,
    predict,
    problems,
)
from service.api.dependencies import refuse_unread_query
from service.api.document import OpenApiDocument
from service.api.http_forms import HttpForms
from service.api.openapi import OF_ALL
from service.api.requests import NPZ, PARQUET
from service.auth.auth import AuthMiddleware
from service.auth.keys import KeyRing
from service.auth.scopes import Scope as KeyScope
from service.auth.scopes import authorize, needed_scope
from service.context import Context
from service.integrations import installed_integrations
from service.server.process import end_with_notice, trim_memory
from service.settings import Settings
from service.shared_state import StateBackend
from service.telemetry.logs import request_log
from service.telemetry.observe import Observe
from service.telemetry.tracing import tracing_of

# FastAPI's own telemetry, which the environment could turn on: its spans repeat queries.
NO_TELEMETRY = {"tracing": False, "metrics": False, "logs": False, "auto_configure": False}
# JSON takes a fourth of its length, at 100 MB/s
GZIP: dict[str, Any] = {
    "compresslevel": 1,
    "exclude_content_types": (*DEFAULT_EXCLUDED_CONTENT_TYPES, NPZ, PARQUET),
}
PACKED_FROM = 64 << 10  # bytes of an answer of a frequent route
FREQUENT = {"/predict", "/acquire"}  # POST routes that take the short path
DESCRIPTION = (
    "Predictions of Bayesian neural networks, each with how uncertain it is and why, and a "
    "calibrated flag for inputs\nunlike the data. Quantities of information are in nats. The "
    "examples are rows of the models that are served; where\nthere are none, or the API needs a "
    "key, of the digits model.\n"
)


def create_app(
    settings: Settings,
    backend: StateBackend | None = None,
    preflights: Path | None = None,
    spare: PreflightProcess | None = None,
) -> FastAPI:
    """Return the application; it opens the model store when it starts.

    Other processes that serve share state by `backend`, and find the outcomes of each other's
    preflights in a folder. `spare` is a process for the first preflight, started ahead.
    """
    if settings.preflight_timeout_s > 0:
        bound_memory(limits.PREFLIGHT_BYTES)
    key_ring = KeyRing(settings)
    context = Context(settings, key_ring, backend, preflights, spare)
    tracing = tracing_of(settings)
    runs_jobs = settings.state is not None and settings.jobs_at_once > 0

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        # before versions are tried, which may take long
        end_with_notice(context.ending, settings.shutdown_grace_s)
        await context.threads.loads(context.watcher.start)
        key_ring.start()
        context.shared_state.start()
        if runs_jobs:
            context.runner.start()
        gc.collect()
        # what is there now stays: looking through it for garbage would stop all threads
        gc.freeze()
        with trim_memory():
            yield
        gc.unfreeze()
        context.shared_state.stop()
        if runs_jobs:
            context.runner.stop()
        context.ending.set()
        context.engine.close()
        context.preflights.close()
        context.threads.close()
        context.file_preflights.close()
        context.watcher.stop()
        context.models.close()
        context.close_state()
        key_ring.stop()
        if tracing is not None:
            tracing.close()

    app = FastAPIOffline(
        title="Dubito",
        description=DESCRIPTION,
        version=VERSION,
        lifespan=lifespan,
        redoc_url=None,
        # else to whatever host the request names, and clients resend their keys there
        redirect_slashes=False,
        telemetry=NO_TELEMETRY,
        responses=OF_ALL,
        generate_unique_id_function=lambda route: route.name,
    )
    app.state.context = context
    own = [predict, acquire, examples, pool_files, new_jobs, jobs, labels, models]
    if key_ring.keys.has_administration:
        own.append(admin)
    others = [health.router, problems.router]  # pass over unknown queries
    frequent = set(FREQUENT)
    for integration in installed_integrations().values():
        others += integration.routers()
        frequent |= {*integration.short_paths}
    if settings.page:
        others.append(page.router)
        app.mount("/page", page.PageFiles())
    for part in own:
        app.include_router(part.router, dependencies=[Depends(refuse_unread_query)])
    for router in others:
        app.include_router(router)
    routers = [*(part.router for part in own), *others]
    routes = [route for router in routers for route in router.routes]
    app.state.routes = [route for route in routes if isinstance(route, APIRoute)]
    for route in app.state.routes:
        needed_scope(route)  # fails for a route that declares none
    app.openapi = OpenApiDocument(app, context, app.state.routes)  # type: ignore[method-assign]
    problems.install(app)

    # The innermost first: the last one added is the first that a request passes.
    app.add_middleware(HttpForms)
    app.add_middleware(GZipMiddleware, **GZIP)
    app.add_middleware(Shortcut, routes=[r for r in app.state.routes if r.path in frequent])
    origins = settings.known_origins()
    app.add_middleware(AuthMiddleware, ring=key_ring, hosts=settings.known_hosts(), origins=origins)
    if origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=sorted(origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["Location", "Retry-After", "X-Request-ID", "ETag"],
        )
    app.add_middleware(
        Observe,
        metrics=context.metrics,
        log=request_log(settings),
        tracing=tracing,
        ending=context.ending,
        prefix=settings.prefix,
    )
    return app


class Shortcut:
    """Middleware that calls the endpoints of frequent POST routes directly.

    The framework's layers in between take longer than reading a row. So these endpoints take the
    request and parameters of the path only; the scope that a route needs is checked here.
    """

    def __init__(self, app: ASGIApp, routes: Sequence[APIRoute]) -> None:
        self.app = app
        posts = [(route, needed_scope(route)) for route in routes if route.methods == {"POST"}]
        self.paths = {post[0].path: post for post in posts if not post[0].param_convertors}
        self.patterns = [post for post in posts if post[0].param_convertors]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_post = scope["type"] == "http" and scope["method"] == "POST"
        match = self._find(scope["path"]) if is_post else None
        if match is None:
            await self.app(scope, receive, send)
            return
        route, needed, parameters = match
        scope["route"] = route
        request = Request(scope, receive, send)
        answer: ASGIApp
        try:
            if needed is not None:
                authorize(scope, needed)
            response = await route.endpoint(request, **parameters)
        except DubitoError as error:
            response = problems.error_response(scope, error)
        is_large = int(response.headers.get("content-length", 0)) >= PACKED_FROM
        answer = GZipMiddleware(response, **GZIP) if is_large else response
        await answer(scope, receive, send)

    def _find(self, path: str) -> tuple[APIRoute, KeyScope | None, dict[str, str]] | None:
        if path in self.paths:
            return *self.paths[path], {}
        for route, needed in self.patterns:
            match = route.path_regex.fullmatch(path)
            if match is not None:
                return route, needed, match.groupdict()
        return None
