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

from integrations.label_studio import routes as label_studio
from integrations.mlflow import scoring as mlflow
from integrations.open_inference import routes as open_inference
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
    page,
    pool_files,
    predict,
    problems,
)
from service.api.http_forms import HttpForms, refuse_query
from service.api.openapi import OF_ALL, with_keys, with_schemas
from service.api.requests import NPZ, PARQUET
from service.auth.auth import Door
from service.auth.keys import KeyRing
from service.context import Context
from service.server.process import end_with_notice, trim_memory
from service.settings import Settings
from service.shared_state import StateBackend
from service.telemetry.logs import request_log
from service.telemetry.observe import Observe
from service.telemetry.tracing import tracing_of

# FastAPI's own telemetry, which the environment could turn on: its spans repeat queries.
NO_TELEMETRY = {"tracing": False, "metrics": False, "logs": False, "auto_configure": False}
GZIP_LEVEL = 4  # JSON takes a fourth of its length, at 60 MB/s
NOT_PACKED = (*DEFAULT_EXCLUDED_CONTENT_TYPES, NPZ, PARQUET)
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
    own = [examples, pool_files, jobs, labels, models]
    if key_ring.keys.has_administration:
        own.append(admin)
    # whose callers may add to the query
    others = [label_studio, health, problems, open_inference, mlflow]
    if settings.page:
        others.append(page)
    routers = [part.router for part in (predict, acquire, *own, *others)]
    for router in routers:
        is_own = router in [part.router for part in own]
        app.include_router(router, dependencies=[Depends(refuse_query)] if is_own else None)
    every = [route for router in routers for route in router.routes]
    app.state.routes = [route for route in every if isinstance(route, APIRoute)]
    _complete_document(app, context)
    problems.install(app)
    frequent = [r for part in (predict, acquire, open_inference) for r in part.router.routes]
    posts = [r for r in frequent if isinstance(r, APIRoute) and r.methods == {"POST"}]
    app.add_middleware(HttpForms)  # innermost
    app.add_middleware(GZipMiddleware, compresslevel=GZIP_LEVEL, exclude_content_types=NOT_PACKED)
    app.add_middleware(Shortcut, routes=posts)
    origins = settings.known_origins()
    app.add_middleware(Door, ring=key_ring, hosts=settings.known_hosts(), origins=origins)
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
    """Middleware that calls the endpoints of POST routes directly.

    The framework's layers in between take longer than reading a row.
    """

    def __init__(self, app: ASGIApp, routes: Sequence[APIRoute]) -> None:
        self.app = app
        self.routes = {route.path: route for route in routes if not route.param_convertors}
        self.patterns = [route for route in routes if route.param_convertors]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = self._find(scope) if scope["type"] == "http" and scope["method"] == "POST" else None
        if found is None:
            await self.app(scope, receive, send)
            return
        scope["route"], parameters = found
        request = Request(scope, receive, send)
        try:
            response = await scope["route"].endpoint(request, **parameters)
        except DubitoError as error:
            response = problems.error_response(scope, error)
        await response(scope, receive, send)

    def _find(self, scope: Scope) -> tuple[APIRoute, dict[str, str]] | None:
        route = self.routes.get(scope["path"])
        if route is not None:
            return route, {}
        for route in self.patterns:
            match = route.path_regex.fullmatch(scope["path"])
            if match is not None:
                return route, match.groupdict()
        return None


def _complete_document(app: FastAPI, context: Context) -> None:
    general = app.openapi

    def openapi() -> dict[str, Any]:
        document, keys = with_schemas(general()), context.key_ring.keys
        if keys.api_is_open:
            latest = [context.models.latest(name) for name in context.models.names()]
            document = examples.with_examples(document, [m for m in latest if m is not None])
        return with_keys(document, keys)

    app.openapi = openapi  # type: ignore[method-assign]
