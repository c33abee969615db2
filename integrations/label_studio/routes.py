"""Label Studio's machine learning backend, a model under `/label-studio/{name}`: predictions, and
webhooks of labels.

The URL of the backend is http://HOST:PORT/label-studio/NAME. A key comes as the password of its
basic authentication, for webhooks in a header.
"""

import asyncio
import math
import os
import time
from base64 import b64decode
from contextlib import suppress
from functools import cache, partial
from typing import Any, Literal

import orjson
from fastapi import APIRouter, Depends, Request, Response
from pydantic import BaseModel

from integrations.label_studio.client import (
    URL_VARIABLE,
    LabelStudio,
    label_studio_from_environment,
)
from integrations.label_studio.projects import (
    Fetch,
    LabelConfig,
    label_config,
    label_id,
    result_of,
    row_input,
    value_of,
)
from model_store.artifacts.manifest import Manifest
from model_store.errors import InvalidInput
from model_store.scores.classification import Scores
from model_store.state.labels import is_known
from model_store.types import Pause
from service import limits
from service.api.labels import OBJECT_BYTES, keep_labels
from service.api.media_types import JSON
from service.api.openapi import ERRORS, answers
from service.api.predict import PredictWork, predict
from service.api.requests import parse_json, read_body, require_json, validate
from service.api.responses import Answer, json_response, response
from service.api.schemas import Envelope, LabelEntry, PredictRequest
from service.auth.auth import authenticate
from service.auth.scopes import key_name, needs
from service.context import Context, context_of
from service.errors import PastDeadline, TooLarge
from service.models.models import ServedModel
from service.request_context import RequestContext

OF_LABELS = {"ANNOTATION_CREATED", "ANNOTATION_UPDATED"}
MAX_WEBHOOK_BYTES = 4 << 20


class StudioHealthAnswer(BaseModel):
    """That the backend is up."""

    status: Literal["UP"]
    model_class: str


class StudioSetupAnswer(BaseModel):
    """Which version answers."""

    model_version: str


class StudioResultAnswer(BaseModel):
    """A prediction in Label Studio's form; the score is lowest where the model doubts most."""

    model_version: str
    score: float
    result: list[dict[str, Any]]


class StudioPredictAnswer(BaseModel):
    """A result for each task."""

    results: list[StudioResultAnswer]
    model_version: str


class StudioWebhookAnswer(BaseModel):
    """Whether a label was kept."""

    kept: bool


async def accept_basic_authentication(request: Request) -> None:
    """Accept a key as the password of basic authentication: Label Studio sends no other header."""
    kind, _, content = request.headers.get("authorization", "").partition(" ")
    if kind.lower() == "basic" and key_name(request.scope) is None:
        with suppress(ValueError):
            password = b64decode(content.strip(), validate=True).partition(b":")[2]
            authenticate(request.scope, context_of(request).key_ring.keys, password)


router = APIRouter(
    prefix="/label-studio/{name}",
    tags=["Label Studio"],
    dependencies=[Depends(accept_basic_authentication)],
)
A_JSON_OBJECT: dict[str, Any] = {
    "requestBody": {"required": True, "content": {JSON: {"schema": {"type": "object"}}}}
}


@router.get("/health", responses=answers(StudioHealthAnswer, 404), dependencies=[needs("read")])
async def get_label_studio_health(request: Request, name: str) -> Response:
    """Say that the backend is up."""
    context_of(request).models.name(name)
    return json_response({"status": "UP", "model_class": "Dubito"})


@router.post(
    "/setup",
    responses=answers(StudioSetupAnswer, *ERRORS),
    openapi_extra=A_JSON_OBJECT,
    dependencies=[needs("predict")],
)
async def post_label_studio_setup(request: Request, name: str) -> Response:
    """Say which version answers, if a project's labelling configuration suits the model."""
    context = context_of(request)
    call = RequestContext.from_request(request, context.settings.deadline_s)
    content = await _read(context, call, MAX_WEBHOOK_BYTES)
    served = await context.find_model(call, Envelope(model=name))
    label_config(content.get("schema"), served.model.manifest)
    return json_response({"model_version": model_version(served)})


@router.post(
    "/predict",
    responses=answers(StudioPredictAnswer, *ERRORS),
    openapi_extra=A_JSON_OBJECT,
    dependencies=[needs("predict")],
)
async def post_label_studio_predict(request: Request, name: str) -> Response:
    """Predict tasks; the score is lowest where the model doubts most: Label Studio asks for such
    tasks first."""
    context = context_of(request)
    settings, call = context.settings, context.begin(request)
    content = await _read(context, call, limits.MAX_JSON_BYTES)
    envelope = PredictRequest(inputs=[], model=name)
    served = await context.find_model(call, envelope)
    manifest = served.model.manifest
    config = label_config(content.get("label_config"), manifest)
    tasks = content.get("tasks")
    if not isinstance(tasks, list) or not tasks:
        raise InvalidInput("tasks", "an array of tasks", "something else, or none")
    if len(tasks) > settings.max_rows:
        raise TooLarge("tasks", f"at most {settings.max_rows}", str(len(tasks)))
    rows = await asyncio.to_thread(_rows_of, _fetch, manifest, config, tasks, call)
    work = PredictWork(call, envelope, served, rows, "tasks", is_live=False)
    write = partial(_write_predictions, model_version(served), config)
    return response(await predict(context, work, write), JSON)


def _write_predictions(
    version: str, config: LabelConfig, answer: Answer, _pause: Pause
) -> list[bytes]:
    scores, classes = answer.scores, answer.results.manifest.classes or ()
    if isinstance(scores, Scores):
        values: list[Any] = [classes[i] for i in scores.label.tolist()]
        doubts = (scores.entropy / math.log(max(2, len(classes)))).tolist()
    else:
        values = scores.mean.tolist()
        doubts = (scores.std / (1.0 + scores.std)).tolist()
    results = [
        {"model_version": version, "score": 1.0 - min(1.0, doubt), "result": result_of(config, v)}
        for v, doubt in zip(values, doubts, strict=True)
    ]
    return [orjson.dumps({"results": results, "model_version": version})]


@router.post(
    "/webhook",
    status_code=201,
    responses=answers(StudioWebhookAnswer) | answers(StudioWebhookAnswer, *ERRORS, 507, status=201),
    openapi_extra=A_JSON_OBJECT,
    dependencies=[needs("label")],
)
async def post_label_studio_webhook(request: Request, name: str) -> Response:
    """Keep the label of an annotation that was made or changed: 201 once it is on the disk, 200 if
    it is none."""
    context = context_of(request)
    call = context.begin(request)
    require_json(request)
    content = await _read(context, call, MAX_WEBHOOK_BYTES)
    action = content.get("action")
    if not isinstance(action, str) or action not in OF_LABELS:
        return json_response({"kept": False})
    served = await context.find_model(call, Envelope(model=name))
    key = key_name(request.scope)
    kept = await asyncio.to_thread(_keep, _fetch, context, served, content, call, key)
    return json_response({"kept": kept}, 201 if kept else 200)


async def _read(context: Context, call: RequestContext, limit: int) -> dict[str, Any]:
    body = await read_body(call, limit)
    call.reservation.reserve(OBJECT_BYTES * len(body), "body")
    return await context.threads.state(partial(parse_json, body))


def model_version(served: ServedModel) -> str:
    return f"{served.name}:{served.version}"


def _fetch(url: str) -> bytes:
    """Fetch a file of the one origin that the environment names; for a worker thread."""
    if not os.environ.get(URL_VARIABLE):
        expected = f"images as data URIs, unless {URL_VARIABLE} names an origin"
        raise InvalidInput("tasks", expected, "a URL")
    return _label_studio().fetch(url)


@cache
def _label_studio() -> LabelStudio:
    return label_studio_from_environment()


def _rows_of(
    fetch: Fetch, manifest: Manifest, config: LabelConfig, tasks: list[Any], call: RequestContext
) -> list[Any]:
    """Return the row of each task. May fetch images: from a thread."""
    rows = []
    for n, task in enumerate(tasks):
        if time.monotonic() > call.deadline:  # a fetch may take long
            raise PastDeadline
        data = task.get("data") if isinstance(task, dict) else None
        row = row_input(manifest, config, data, f"tasks.{n}.data", fetch)
        if isinstance(row, str):
            call.reservation.reserve(len(row), "tasks")
        rows.append(row)
    return rows


def _keep(
    fetch: Fetch,
    context: Context,
    served: ServedModel,
    content: dict[str, Any],
    call: RequestContext,
    key: str | None,
) -> bool:
    """Keep the label of a webhook; False where it says nothing of the model's task. From a thread.

    A later annotation of the task takes the place of an earlier one; the same again changes
    nothing.
    """
    manifest = served.model.manifest
    project, task = content.get("project"), content.get("task")
    text = project.get("label_config") if isinstance(project, dict) else None
    config = label_config(text, manifest)
    value = value_of(config, content.get("annotation"))
    if value is None:
        return False
    name = label_id(project, task)
    field = "label" if isinstance(value, str) else "target"
    entry = validate(LabelEntry, {"id": name, field: value})
    if not is_known(context.state, served.name, name):
        data = task.get("data") if isinstance(task, dict) else None
        entry.input = row_input(manifest, config, data, "task.data", fetch)
    keep_labels(context, served, [entry], call, True, key)
    return True
