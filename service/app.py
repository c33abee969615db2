"""The application: what the routes share, the routes, and what every request passes."""

import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi.routing import APIRoute
from fastapi_offline import FastAPIOffline

from service.context import Context
from service.http import problems
from service.middleware import auth
from service.middleware.keys import read_keys
from service.middleware.observe import Observe
from service.middleware.shortcut import Shortcut
from service.observability.logs import request_log
from service.observability.tracing import tracing_of
from service.process.shutdown import CloseConnections, end_with_notice
from service.process.supervisor import WorkerPlace
from service.routes import acquire, admin, health, models, predict, report
from service.settings import Settings

# FastAPI's own telemetry, which the environment could turn on: its spans repeat queries.
NO_TELEMETRY = {"tracing": False, "metrics": False, "logs": False, "auto_configure": False}
DESCRIPTION = """\
Predictions of Bayesian neural networks, each with how uncertain it is and why, and a calibrated flag for inputs
unlike the data. Quantities of information are in nats. The examples work as they stand against the digits model.
"""


def create_app(settings: Settings, place: WorkerPlace | None = None) -> FastAPI:
    """Return the application, alone or in a worker's place; it opens the model store when it starts."""
    keys = read_keys(settings)
    context = Context(settings, keys, place)
    tracing = tracing_of(settings)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await context.threads.files(context.models.start)
        end_with_notice(context.ending, settings.notice_s)
        context.worker_metrics.start()
        gc.collect()
        gc.freeze()  # what is there now stays: looking through it for garbage would stop all threads
        yield
        gc.unfreeze()
        context.worker_metrics.stop()
        context.engine.close()
        context.threads.close()
        context.models.stop()
        if tracing is not None:
            tracing.close()

    app = FastAPIOffline(
        title="Dubito",
        description=DESCRIPTION,
        version="0.1.0",
        lifespan=lifespan,
        redoc_url=None,
        redirect_slashes=False,  # else to whatever host the request names, and clients resend their keys there
        telemetry=NO_TELEMETRY,
    )
    app.state.context = context
    routers = [predict.router, acquire.router, models.router, report.router, health.router]
    if keys.admin:
        routers.append(admin.router)
    for router in routers:
        app.include_router(router)
    problems.install(app)
    asked_most = [r for part in (predict, acquire) for r in part.router.routes if isinstance(r, APIRoute)]
    app.add_middleware(Shortcut, routes=asked_most)  # innermost
    auth.install(app, keys)
    app.add_middleware(CloseConnections, ending=context.ending)
    app.add_middleware(Observe, metrics=context.metrics, log=request_log(settings), tracing=tracing)
    return app
