"""What the routes share: models, engine, admission, metrics and settings."""

import asyncio
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from fastapi import Request
from jaxtyping import Float32
from prometheus_client import generate_latest

from model_store.inference.trials import TrialProcess
from service.engine.admission import Admission
from service.engine.batching import Engine
from service.engine.threads import Threads
from service.errors import PastDeadline
from service.http.requests import (
    FORM,
    JSON,
    NUMBERS_AT_ONCE,
    SMALL_JSON_BYTES,
    Rows,
    read_request,
    request_media_type,
    rows_array,
)
from service.http.schemas import Envelope
from service.http.schemas import Request as AnyEnvelope
from service.middleware.key_file import KeyRing
from service.observability.metrics import Metrics
from service.observability.records import record_of
from service.observability.worker_metrics import WorkerMetrics
from service.process.notices import Notices
from service.process.supervisor import WorkerPlace
from service.registry.collector import LoadedCollector
from service.registry.models import Models, Served
from service.registry.trials import Trials
from service.settings import Settings


class Context:
    """What the routes share, made once for an application."""

    def __init__(
        self, settings: Settings, key_ring: KeyRing, place: WorkerPlace | None, spare: TrialProcess | None = None
    ) -> None:
        self.settings = settings
        self.key_ring = key_ring
        idle = threading.Event()
        self.ending = threading.Event()
        self.trials = Trials(settings, self.ending, None if place is None else place.folder, spare)
        self.models = Models(settings, idle, self.ending, self.trials)
        actions: dict[str, Callable[..., Any]] = {
            "refresh": self.models.look,
            "unload": self.models.unload,
            "reset_drift": self.models.reset_drift,
        }
        self.notices = Notices(place, actions)
        self.metrics = Metrics()
        self.metrics.registry.register(LoadedCollector(self.models))
        self.admission = Admission(settings, idle)
        self.engine = Engine(self.admission, self.metrics)
        self.threads = Threads()
        self.worker_metrics = WorkerMetrics(self.metrics_page, place)

    def metrics_page(self) -> bytes:
        """Return this process's metrics as Prometheus' text."""
        self.metrics.queued_row_draws.set(self.admission.row_draws)
        self.metrics.queued_requests.set(self.admission.in_work)
        return generate_latest(self.metrics.registry)

    async def served(self, envelope: Envelope) -> Served:
        """Return the model that a request means, trying and loading its version first where it must.

        Raises:
            PastDeadline: if it is still being tried when the request should have been answered.
        """
        wanted = envelope.model, envelope.version
        served = self.models.peek(*wanted)
        if served is None:
            trial = await self.threads.files(partial(self.models.trial_of, *wanted))
            if trial is not None:
                await asyncio.wait(
                    [asyncio.wrap_future(trial)], timeout=envelope.deadline_s or self.settings.deadline_s
                )
                if not trial.done():
                    raise PastDeadline
            served = await self.threads.loads(partial(self.models.get, *wanted))
        return served

    async def read(
        self, request: Request, body: bytes, kind: type[AnyEnvelope], rows_field: str, max_rows: int
    ) -> tuple[AnyEnvelope, Rows]:
        """Return a request's envelope and its rows as they came; forms and long JSON away from the event loop."""
        work = partial(read_request, request, body, kind, rows_field, max_rows)
        media_type = request_media_type(request)
        takes_long = media_type == FORM or (media_type == JSON and len(body) > SMALL_JSON_BYTES)
        read = await self.threads.requests(work) if takes_long else work()
        record_of(request.scope).read = time.perf_counter()
        return read

    async def rows(self, rows: Rows, served: Served, field: str) -> Float32[np.ndarray, "N I"]:
        """Return a request's rows as numbers; images, objects and many numbers are read away from the event loop."""
        spec = served.model.manifest.input
        work = partial(rows_array, rows, spec, field, self.settings.max_image_pixels)
        is_large = len(rows) * served.model.row_size > NUMBERS_AT_ONCE
        takes_long = isinstance(rows, list) and (is_large or isinstance(rows[0], str | bytes | dict))
        return await self.threads.requests(work) if takes_long else work()

    def deadline(self, begun: float, envelope: Envelope) -> float:
        """Return when a request that came at `begun` must be answered, on the clock of time.monotonic."""
        return begun + (envelope.deadline_s or self.settings.deadline_s)


def context_of(request: Request) -> Context:
    """Return the context of the application that a request came to."""
    context: Any = request.app.state.context
    assert isinstance(context, Context)
    return context
