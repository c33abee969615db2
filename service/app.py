"""The FastAPI application."""

import asyncio
import gc
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pkgutil import resolve_name

from fastapi import Depends, FastAPI
from fastapi.routing import APIRoute
from fastapi.telemetry import TelemetryConfig
from starlette.middleware.cors import CORSMiddleware

from model_store.inference.runtime import limit_session_memory
from model_store.version import VERSION
from service import limits
from service.api import (
    acquire,
    admin,
    examples,
    health,
    jobs,
    labels,
    models,
    openapi,
    page,
    predict,
    problems,
)
from service.api.middleware import AuthMiddleware, Compression, HeadAsGet, Observe, Shortcut
from service.auth.keys import KeyRing
from service.auth.scopes import needed_scope
from service.context import Context, check_query_is_read
from service.integrations import installed_integrations
from service.server.process import end_with_notice, trim_memory
from service.settings import Settings
from service.shared_state import StateBackend
from service.telemetry.logs import log_request
from service.telemetry.tracing import Tracing

# FastAPI's telemetry, which environment variables could enable, would record query strings.
NO_TELEMETRY: TelemetryConfig = {
    "tracing": False,
    "metrics": False,
    "logs": False,
    "auto_configure": False,
}
FREQUENT = {"/predict", "/acquire"}  # POST routes that bypass most of FastAPI
DESCRIPTION = (
    "Predictions of Bayesian neural networks with their uncertainty, and a calibrated flag for "
    "unusual inputs.\nEntropies and mutual information are in nats. The examples are for the "
    "digits model.\n"
)


def create_app(settings: Settings, backend: StateBackend | None = None) -> FastAPI:
    """Create the application. Processes of one service share the state in `backend`."""
    if settings.preflight_timeout_s > 0:
        limit_session_memory(limits.PREFLIGHT_BYTES)
    key_ring, endpoint = KeyRing(settings), settings.otlp_endpoint
    tracing = None if endpoint is None else Tracing(str(endpoint))
    context = Context(settings, key_ring, backend)
    app = FastAPI(
        title="Dubito",
        description=DESCRIPTION,
        version=VERSION,
        lifespan=_lifespan(context, tracing),
        # `service.api.openapi` has these routes.
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        # A redirect would use the request's Host header, and clients would resend their keys.
        redirect_slashes=False,
        telemetry=NO_TELEMETRY,
        responses=openapi.ERRORS,
        generate_unique_id_function=lambda route: route.name,
    )
    app.state.context = context
    _add_routes(app, context)
    _add_middleware(app, context, tracing)
    problems.install(app)
    return app


def _lifespan(
    context: Context, tracing: Tracing | None
) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    settings = context.settings
    runs_jobs = settings.state is not None and settings.jobs_at_once > 0

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        # Preflights can take long, so SIGTERM must already work.
        end_with_notice(context.ending, settings.shutdown_grace_s)
        await asyncio.to_thread(context.watcher.start)
        context.key_ring.start()
        context.shared_state.start()
        if runs_jobs:
            context.runner.start()
        gc.collect()
        # Garbage collection blocks all threads, so exclude permanent objects.
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
        context.key_ring.stop()
        if tracing is not None:
            tracing.close()

    return lifespan


def _add_routes(app: FastAPI, context: Context) -> None:
    parts = [predict, acquire, examples, jobs, labels, models]
    if context.key_ring.keys.has_administration:
        parts.append(admin)
    tolerant = [openapi.router, health.router, problems.router]  # accept any query string
    integrations = installed_integrations().values()
    tolerant += [resolve_name(i.router) for i in integrations if i.router is not None]
    app.mount(openapi.SWAGGER_FILES, page.PackageFiles(packages=[("fastapi_offline", "static")]))
    if context.settings.page:
        tolerant.append(page.router)
        app.mount("/page", page.PageFiles(directory=page.FOLDER))
    for part in parts:
        app.include_router(part.router, dependencies=[Depends(check_query_is_read)])
    for router in tolerant:
        app.include_router(router)
    routers = [*(part.router for part in parts), *tolerant]
    routes = [route for router in routers for route in router.routes]
    app.state.routes = [route for route in routes if isinstance(route, APIRoute)]
    for route in app.state.routes:
        needed_scope(route)  # raises if the route declares none
    keys = context.key_ring.keys
    app.openapi = openapi.OpenApiDocument(app, keys, app.state.routes)  # type: ignore[method-assign]


def _add_middleware(app: FastAPI, context: Context, tracing: Tracing | None) -> None:
    settings, ring = context.settings, context.key_ring
    hosts, origins = settings.parse_allowed_hosts(), settings.parse_allowed_origins()
    integrations = installed_integrations().values()
    frequent = FREQUENT.union(*(integration.short_paths for integration in integrations))
    routes = [r for r in app.state.routes if r.path in frequent and r.methods == {"POST"}]
    app.add_middleware(HeadAsGet)
    app.add_middleware(Compression)
    app.add_middleware(Shortcut, routes=routes)
    app.add_middleware(AuthMiddleware, ring=ring, hosts=hosts, origins=origins)
    if origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=sorted(origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["Location", "Retry-After", "X-Request-ID"],
        )
    app.add_middleware(
        Observe,
        metrics=context.metrics,
        log=log_request if settings.log == "json" else None,
        tracing=tracing,
        ending=context.ending,
        prefix=settings.prefix,
    )
