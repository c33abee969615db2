"""The application: routes, each a few steps from request to answer."""

import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import numpy as np
import orjson
from fastapi import FastAPI, Request, Response
from fastapi.routing import APIRoute
from fastapi_offline import FastAPIOffline
from jaxtyping import Float32
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.requests import ClientDisconnect

from model_store.artifacts.report import REPORT
from model_store.errors import InvalidInput
from service.engine.acquisition import DEFAULTS, RANDOM, check_acquisition, id_hashes, pool_scores, random_scores, top
from service.engine.admission import Admission
from service.engine.batching import BATCH_ROW_DRAWS, Job, Predicted, Predictor, part_rows, take_draws, timed
from service.http import problems
from service.http.options import decision_options
from service.http.problems import NotReady, TooLarge
from service.http.requests import (
    FORM,
    JSON,
    NPY,
    NPZ,
    Rows,
    hung_up,
    read_body,
    read_request,
    request_media_type,
    rows_array,
)
from service.http.responses import predict_json, predict_npz
from service.http.schemas import AcquireAnswer, AcquireRequest, Envelope, PredictAnswer, PredictRequest, Problem
from service.http.schemas import Request as Envelope_
from service.middleware import auth
from service.middleware.keys import read_keys
from service.middleware.observe import Observe
from service.middleware.shortcut import Shortcut
from service.observability.logs import request_log
from service.observability.metrics import Metrics
from service.observability.records import record_of
from service.observability.tracing import tracing_of
from service.observability.worker_metrics import Pages
from service.process.shutdown import CloseConnections, end_with_notice
from service.process.supervisor import Place
from service.registry.drift import drift_content
from service.registry.models import HOW_TO_PUBLISH, Models, Served
from service.registry.reservoir import fresh_seed
from service.routes import admin
from service.routes.report import report_file, report_links
from service.settings import Settings

# FastAPI's own telemetry, which the environment could turn on: its spans repeat queries.
NO_TELEMETRY = {"tracing": False, "metrics": False, "logs": False, "auto_configure": False}
DESCRIPTION = """\
Predictions of Bayesian neural networks, each with how uncertain it is and why, and a calibrated flag for inputs
unlike the data. Quantities of information are in nats. The examples work as they stand against the digits model.
"""


class Service:
    """What the routes share."""

    def __init__(self, settings: Settings, place: Place | None) -> None:
        self.settings = settings
        idle = threading.Event()
        self.models = Models(settings, idle)
        self.metrics = Metrics(self.models)
        self.admission = Admission(settings, idle)
        self.predictor = Predictor(self.admission, self.metrics)
        self.pages = Pages(self.metrics_page, place)
        self.ending = threading.Event()

    def metrics_page(self) -> bytes:
        """Return this process's metrics as Prometheus' text."""
        self.metrics.queued_row_draws.set(self.admission.row_draws)
        self.metrics.queued_requests.set(self.admission.in_work)
        return generate_latest(self.metrics.registry)

    async def served(self, envelope: Envelope) -> Served:
        """Return the model that a request means, loading its version first where it must."""
        served = self.models.peek(envelope.model, envelope.version)
        if served is None:
            served = await self.predictor.load(partial(self.models.get, envelope.model, envelope.version))
        return served

    async def read(
        self, request: Request, body: bytes, kind: type[Envelope_], rows_field: str, max_rows: int
    ) -> tuple[Envelope_, Rows]:
        """Return a request's envelope and its rows as they came; a form is taken apart away from the event loop."""
        work = partial(read_request, request, body, kind, rows_field, max_rows)
        read = await self.predictor.load(work) if request_media_type(request) == FORM else work()
        record_of(request.scope).read = time.perf_counter()
        return read

    async def rows(self, rows: Rows, served: Served, field: str) -> Float32[np.ndarray, "N I"]:
        """Return a request's rows as numbers; images and objects are looked at away from the event loop."""
        spec = served.model.manifest.input
        work = partial(rows_array, rows, spec, field, self.settings.max_image_pixels)
        takes_long = isinstance(rows, list) and isinstance(rows[0], str | bytes | dict)
        return await self.predictor.load(work) if takes_long else work()

    def num_samples(self, envelope: Envelope, served: Served) -> int:
        """Return the number of draws that a request wants."""
        wanted = envelope.num_samples or served.model.manifest.noise.default_draws
        if wanted > self.settings.max_samples:
            raise InvalidInput("num_samples", f"at most {self.settings.max_samples}", str(wanted))
        most = served.model.manifest.noise.max_draws
        if most is not None and wanted > most:
            expected = f"at most {most}, since {served.name} has no more different draws"
            raise InvalidInput("num_samples", expected, str(wanted))
        return wanted

    def deadline(self, begun: float, envelope: Envelope) -> float:
        """Return when a request must be answered, on the clock of time.monotonic."""
        return begun + (envelope.deadline_s or self.settings.deadline_s)


def create_app(settings: Settings, place: Place | None = None) -> FastAPI:
    """Return the application, alone or in a worker's place; it opens the model store when it starts."""
    service = Service(settings, place)
    keys = read_keys(settings)
    tracing = tracing_of(settings)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await service.predictor.load(service.models.start)
        end_with_notice(service.ending, settings.notice_s)
        service.pages.start()
        yield
        service.pages.stop()
        service.predictor.close()
        service.models.stop()
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
    errors: dict[int | str, dict[str, Any]] = {
        status: {"model": Problem, "content": {problems.PROBLEM_JSON: {}}}
        for status in (404, 413, 415, 422, 429, 503, 504)
    }

    @app.post(
        "/predict",
        responses={200: {"model": PredictAnswer, "content": {NPZ: {}}}, **errors},
        openapi_extra=_request_body(PredictRequest, "inputs"),
    )
    async def post_predict(request: Request) -> Response:
        """Predict rows: label or target, how uncertain and why, and whether a row is unlike the data."""
        service.admission.refuse_overload()  # before there is work on it
        begun = time.monotonic()
        body = await read_body(request, settings.max_body_bytes, settings.max_json_bytes)
        envelope, rows = await service.read(request, body, PredictRequest, "inputs", settings.max_rows)
        served = await service.served(envelope)
        deadline = service.deadline(begun, envelope)
        num_samples = service.num_samples(envelope, served)
        options = decision_options(envelope, served, num_samples, settings.settle)
        numbers = len(rows) * num_samples * served.model.manifest.output_size
        if envelope.return_samples and numbers > settings.max_answer_numbers:
            raise TooLarge(
                f"return_samples: expected at most {settings.max_answer_numbers} numbers to return, got {numbers}"
            )
        as_arrays = NPZ in request.headers.get("accept", "")

        def answered(predicted: Predicted) -> tuple[bytes, int]:
            if envelope.seed is None:  # else a replay
                served.watch(predicted.prediction)
            flags = options.flags(predicted.prediction.p_values.p_value)
            answer = (predict_npz if as_arrays else predict_json)(served, predicted, options, flags)
            flagged = int(np.count_nonzero(flags))
            service.metrics.predicted(served, predicted.prediction.scores, num_samples, flagged)
            return answer, flagged

        with service.admission.admitted(len(rows), num_samples, BATCH_ROW_DRAWS):
            x = await service.rows(rows, served, "inputs")
            job = Job(
                served, x, num_samples, envelope.seed, envelope.return_samples, answered, deadline, options.rule
            )
            answer, flags = await service.predictor.predict(job, partial(hung_up, request))
        record = record_of(request.scope)
        for times in job.times:
            record.worked_on(*times)
        record.used(served.name, served.version, len(x), num_samples, flags)
        return Response(answer, media_type=NPZ if as_arrays else JSON)

    @app.post(
        "/acquire",
        responses={200: {"model": AcquireAnswer}, **errors},
        openapi_extra=_request_body(AcquireRequest, "pool"),
    )
    async def post_acquire(request: Request) -> Response:
        """Rank an unlabelled pool: which rows would teach the model most, all under the same draws."""
        service.admission.refuse_overload()
        begun = time.monotonic()
        body = await read_body(request, settings.max_body_bytes, settings.max_json_bytes)
        envelope, rows = await service.read(request, body, AcquireRequest, "pool", settings.max_pool_rows)
        ids = _ids(envelope, len(rows))
        served = await service.served(envelope)
        task = served.model.manifest.task
        acquisition = envelope.acquisition if "acquisition" in envelope.model_fields_set else DEFAULTS[task]
        check_acquisition(acquisition, task)
        num_samples = service.num_samples(envelope, served)
        with service.admission.admitted(len(rows), num_samples, BATCH_ROW_DRAWS):
            x = await service.rows(rows, served, "pool")
            deadline = service.deadline(begun, envelope)
            answer = await _rank(request, service, served, envelope, acquisition, x, ids, num_samples, deadline)
        draws = 0 if acquisition == RANDOM else num_samples
        service.metrics.ranked(served, len(x), draws)
        record_of(request.scope).used(served.name, served.version, len(x), draws)
        return Response(answer, media_type=JSON)

    @app.get("/models")
    async def get_models() -> Response:
        """List the models: what is served of each, and what cannot be and why."""
        overview = await service.predictor.load(lambda: [_overview(service, n) for n in service.models.names()])
        return Response(orjson.dumps({"models": overview}), media_type=JSON)

    @app.get("/models/{name}", responses={404: errors[404]})
    async def get_model(name: str) -> Response:
        """Describe a model: versions, aliases, and of what `latest` serves the drift, the manifest and evidence."""
        name = service.models.name(name)
        content = await service.predictor.load(lambda: _overview(service, name))
        latest = service.models.latest(name)
        drift = None if latest is None else service.models.drift(latest)
        content["drift"] = None if drift is None else drift_content(drift.report())
        content["manifest"] = None if latest is None else latest.model_dump(mode="json")
        version = None if latest is None else latest.version
        content["evidence"] = await service.predictor.load(lambda: report_links(service.models, name, version))
        return Response(orjson.dumps(content), media_type=JSON)

    @app.get("/models/{name}/versions/{version}/evidence", responses={404: errors[404], 503: errors[503]})
    async def get_evidence(name: str, version: str) -> Response:
        """Give the evaluation report of a version: what `python -m training evaluate` measured of it."""
        content, media_type = await service.predictor.load(lambda: report_file(service.models, name, version, REPORT))
        return Response(content, media_type=media_type)

    @app.get("/models/{name}/versions/{version}/evidence/{file}", responses={404: errors[404], 503: errors[503]})
    async def get_evidence_file(name: str, version: str, file: str) -> Response:
        """Give a file of a version's evaluation report: Markdown, or a plot."""
        content, media_type = await service.predictor.load(lambda: report_file(service.models, name, version, file))
        return Response(content, media_type=media_type)

    @app.get("/health/live")
    async def get_live() -> dict[str, str]:
        """Say that the process answers."""
        return {"status": "live"}

    @app.get("/health/ready", responses={503: errors[503]})
    async def get_ready(request: Request) -> dict[str, Any]:
        """Say whether there is a model to predict with, and to those who may ask models which."""
        may_see_names = auth.may_see_names(request.scope, keys)
        if service.ending.is_set():
            raise NotReady("the service is about to end")
        serving = {name: latest.version for name in service.models.names() if (latest := service.models.latest(name))}
        if not serving:
            broken = [text for name in service.models.names() for text in service.models.broken(name).values()]
            raise NotReady("; ".join(broken if may_see_names else ()) or HOW_TO_PUBLISH)
        return {"status": "ready", "models": serving} if may_see_names else {"status": "ready"}

    @app.get("/metrics", include_in_schema=False)
    async def get_metrics() -> Response:
        return Response(service.pages.all(), media_type=CONTENT_TYPE_LATEST)

    if keys.admin:
        admin.install(app, service.models, service.predictor, errors[404])
    problems.install(app)
    asked_most = [r for r in app.routes if isinstance(r, APIRoute) and r.endpoint in (post_predict, post_acquire)]
    app.add_middleware(Shortcut, routes=asked_most)  # innermost
    auth.install(app, keys)
    app.add_middleware(CloseConnections, ending=service.ending)
    app.add_middleware(Observe, metrics=service.metrics, log=request_log(settings), tracing=tracing)
    return app


async def _rank(
    request: Request,
    service: Service,
    served: Served,
    envelope: AcquireRequest,
    acquisition: str,
    x: Float32[np.ndarray, "N I"],
    ids: list[str],
    num_samples: int,
    deadline: float,
) -> bytes:
    if acquisition == RANDOM:  # needs a seed and no draws
        seed = fresh_seed() if envelope.seed is None else envelope.seed
        hashes = await service.predictor.load(partial(id_hashes, ids, seed))
        scores = random_scores(hashes)
    else:
        draws = await service.predictor.compute(partial(take_draws, served, num_samples, envelope.seed))
        service.metrics.draws(served, made=num_samples)
        seed = draws.seed
        hashes = await service.predictor.load(partial(id_hashes, ids, seed))
        parts = []
        size = part_rows(served, num_samples)
        for start in range(0, len(x), size):  # other requests get their turn between the parts
            if await request.is_disconnected():
                raise ClientDisconnect
            part = x[start : start + size]
            score = partial(pool_scores, served, part, draws, acquisition)
            asked = time.perf_counter()
            begun, scored, ended = await service.predictor.compute(timed(score), deadline)
            record_of(request.scope).worked_on(asked, begun, ended)
            service.metrics.batch(served, len(part), (begun - asked,), ended - begun)
            parts.append(scored)
        scores = np.concatenate(parts)
    ranking = [
        {"rank": rank, "index": i, "id": ids[i], "score": float(scores[i])}
        for rank, i in enumerate(top(scores, hashes, envelope.k).tolist(), start=1)
    ]
    return orjson.dumps(
        {
            "model": served.name,
            "version": served.version,
            "acquisition": acquisition,
            "num_samples": num_samples,
            "seed": seed,
            "pool_size": len(x),
            "ranking": ranking,
        }
    )


def _ids(envelope: AcquireRequest, rows: int) -> list[str]:
    ids = envelope.ids
    if ids is None:
        return [str(i) for i in range(rows)]
    if len(ids) != rows:
        raise InvalidInput("ids", f"one for each of the {rows} pool rows", f"{len(ids)}")
    if len(set(ids)) != rows:
        raise InvalidInput("ids", "different names", "some that are the same")
    return ids


def _overview(service: Service, name: str) -> dict[str, Any]:
    models = service.models
    latest = models.latest(name)
    return {
        "name": name,
        "serving": None if latest is None else latest.version,
        "versions": models.store.versions(name),
        "aliases": models.store.aliases(name),
        "in_memory": {s.version: models.model_bytes(s.model.manifest) for s in models.loaded() if s.name == name},
        "broken": models.broken(name),
        "method": None if latest is None else latest.method,
        "task": None if latest is None else latest.task,
        "input_shape": None if latest is None else latest.input.shape,
        "classes": None if latest is None else latest.classes,
        "target": None if latest is None else latest.target,
        "quality": None if latest is None else latest.quality,
        "smallest_fpr": None if latest is None else latest.detectors.smallest_fpr,
        "smallest_risk": None if latest is None or latest.abstention is None else latest.abstention.smallest_risk,
    }


def _request_body(kind: type[Envelope], rows_field: str) -> dict[str, Any]:
    """Describe a request for OpenAPI: JSON with examples, an npy array with the rest in the query, or a form."""
    schema = kind.model_json_schema()
    examples = {f"example {i}": {"value": value} for i, value in enumerate(schema.pop("examples"), start=1)}
    binary = {"type": "string", "format": "binary"}
    files = {"type": "array", "items": binary, "description": "PNG or JPEG files, for a model of images"}
    form = {**schema, "properties": {**schema["properties"], rows_field: files}}
    content = {JSON: {"schema": schema, "examples": examples}, NPY: {"schema": binary}, FORM: {"schema": form}}
    return {"requestBody": {"required": True, "content": content}}
