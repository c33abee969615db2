"""The application state that routes share, and FastAPI dependencies."""

import asyncio
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

from fastapi import Depends, Request
from prometheus_client import generate_latest

from model_store.errors import InvalidInput, StateUnusable
from model_store.state.database import Database
from model_store.state.labels import has_state
from service import limits
from service.api.schemas import ModelRequest
from service.auth.keys import KeyRing
from service.auth.scopes import MODELS_KEY, allowed_models
from service.batch.runner import JobRunner
from service.engine.admission import Admission
from service.engine.batching import Engine
from service.engine.threads import Threads
from service.errors import PastDeadline
from service.models.models import Models, ServedModel
from service.models.preflights import FilePreflights, Preflights
from service.models.watcher import Watcher
from service.request_context import RequestContext, get_link_prefix
from service.settings import Settings
from service.shared_state import SharedState, StateBackend
from service.telemetry.logs import AuditLog
from service.telemetry.metrics import LoadedCollector, Metrics

NO_STATE = (
    "DUBITO_STATE is empty, so this service has no jobs and labels; "
    "send the request to the service that has them"
)


class Context:
    def __init__(
        self, settings: Settings, key_ring: KeyRing, backend: StateBackend | None = None
    ) -> None:
        self.settings = settings
        self.key_ring = key_ring
        idle = threading.Event()
        self.ending = threading.Event()
        self.preflights = Preflights(settings, self.ending)
        self.models = Models(settings, idle, self.preflights)
        self.watcher = Watcher(self.models, self.ending)
        self.shared_state = SharedState(backend, self.metrics_page, self.models.reset_drift)
        self.metrics = Metrics()
        self.models.on_retain = self.metrics.retain
        self.metrics.max_queued_row_draws.set(limits.MAX_QUEUED_ROW_DRAWS)
        key_names = key_ring.current_names
        self.runner = JobRunner(settings, lambda: self.state, self.metrics, key_names)
        self.metrics.registry.register(LoadedCollector(self.watcher))
        self.metrics.registry.register(key_ring)
        self.admission = Admission(idle)
        self.engine = Engine(self.admission, self.metrics)
        self.threads = Threads(settings.deadline_s)
        self.file_preflights = FilePreflights(self.ending)
        self._state: Database | None = None
        self._opening_state = threading.Lock()

    def metrics_page(self) -> bytes:
        self.metrics.queued_row_draws.set(self.admission.row_draws)
        self.metrics.queued_requests.set(self.admission.active_requests)
        serving = self.served_versions()
        self.metrics.ready.set(float(bool(serving) and not self.missing_models(serving)))
        return generate_latest(self.metrics.registry)

    def served_versions(self) -> dict[str, str]:
        """Return the served version of each model, or an empty dictionary during shutdown."""
        if self.ending.is_set():
            return {}
        latest = {name: self.models.latest(name) for name in self.models.names()}
        return {name: manifest.version for name, manifest in latest.items() if manifest}

    def missing_models(self, serving: dict[str, str]) -> list[str]:
        """Return the models listed in `DUBITO_MODELS` that are not being served."""
        return [name for name in self.settings.parse_models() if name not in serving]

    @property
    def state(self) -> Database:
        """The database of jobs, acquired rows and labels. The first access blocks."""
        with self._opening_state:
            if self._state is None:
                if self.settings.state is None:
                    raise StateUnusable(NO_STATE)
                self._state = Database(self.settings.state)
            return self._state

    def find_state(self) -> Database | None:
        """Return the database, or None if it does not exist yet."""
        folder = self.settings.state
        return self.state if folder is None or has_state(folder) else None

    def close_state(self) -> None:
        with self._opening_state:
            if self._state is not None:
                self._state.close()
                self._state = None

    def begin(self, request: Request, has_rows: bool = False) -> RequestContext:
        """Create a request's context. Reject a body of rows that is too long for the queue."""
        call = RequestContext.from_request(request, self.settings.deadline_s)
        self.admission.refuse_unread(call.length if has_rows else 0, call.client)
        return call

    async def find_model(self, call: RequestContext, envelope: ModelRequest) -> ServedModel:
        """Set a request's deadline and return its model, loading it if necessary."""
        deadline_s = envelope.deadline_s or self.settings.deadline_s
        call.deadline = call.started + deadline_s
        name = self.models.name(envelope.model, call.request.scope.get(MODELS_KEY))
        key = name, envelope.version
        loaded = self.models.peek(*key)
        if loaded is None:
            preflight = await self.threads.files(partial(self.models.find_preflight, *key))
            if preflight is not None:
                over = asyncio.wrap_future(preflight)
                await asyncio.wait([over], timeout=call.deadline - time.monotonic())
                if not over.done():
                    raise PastDeadline
                _ = over.cancelled() or over.exception()  # `get` raises the error
            loaded = await self.threads.loads(partial(self.models.get, *key))
        return loaded


def get_context(request: Request) -> Context:
    context: Any = request.app.state.context
    assert isinstance(context, Context)
    return context


def _depends(get: Callable[[Request], Any]) -> Any:
    """Declare a parameter that is computed from the request on the event loop."""

    async def dependency(request: Request) -> Any:
        return get(request)

    return Depends(dependency)


async def _model_name(request: Request, name: str) -> str:
    return get_context(request).models.name(name, allowed_models(request.scope))


CurrentContext = Annotated[Context, _depends(get_context)]
# Rejected with 429 if too much work is queued
CurrentRequest = Annotated[RequestContext, _depends(lambda r: get_context(r).begin(r))]
# The models that the request's key can use, or None for all
AllowedModels = Annotated[frozenset[str] | None, _depends(lambda r: allowed_models(r.scope))]
ModelName = Annotated[str, Depends(_model_name)]  # path parameter
Audit = Annotated[AuditLog, _depends(lambda r: AuditLog(r.scope))]
LinkPrefix = Annotated[str, _depends(lambda r: get_link_prefix(r.scope))]


async def check_query_is_read(request: Request) -> None:
    """Reject query parameters if the route does not take any."""
    route = request.scope["route"]
    reads_query = route.dependant.query_params or "parameters" in (route.openapi_extra or {})
    if request.query_params and not reads_query:
        raise InvalidInput(
            f"query: {next(iter(request.query_params))[:80]}", "no query parameters", "one"
        )
