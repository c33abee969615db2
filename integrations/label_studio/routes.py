"""Routes for the Label Studio machine learning backend.

The backend of a model has the URL http://HOST:PORT/label-studio/NAME. Label Studio sends the API
key as the password of basic authentication, and webhooks send it in a header.
"""

import math
import os
import time
from base64 import b64decode
from contextlib import suppress
from functools import cache, partial
from typing import Any, Literal

import numpy as np
import orjson
from fastapi import APIRouter, Depends, Request, Response
from jaxtyping import Float32
from pydantic import BaseModel

from integrations.label_studio.client import (
    URL_VARIABLE,
    LabelStudio,
    label_studio_from_environment,
)
from integrations.label_studio.projects import (
    Fetch,
    LabelConfig,
    label_id,
    make_result,
    parse_config,
    read_annotation,
    read_row,
)
from model_store.errors import FieldError, InvalidInput, TooLarge
from model_store.scores.classification import Scores
from model_store.sources.columns import fill_missing
from model_store.sources.rows import RowReader
from model_store.state.labels import is_saved
from model_store.types import Pause
from service import limits
from service.api.labels import OBJECT_BYTES, keep_labels
from service.api.media_types import JSON
from service.api.middleware import authenticate
from service.api.predict import PredictWork, predict
from service.api.requests import parse_json, read_body, require_json, validate
from service.api.responses import Answer, json_response, response
from service.api.schemas import Envelope, LabelEntry, PredictRequest
from service.auth.scopes import key_name, needs
from service.context import Audit, Context, ModelName, get_context
from service.errors import PastDeadline
from service.models.models import ServedModel
from service.request_context import RequestContext
from service.telemetry.logs import AuditLog

LABEL_ACTIONS = {"ANNOTATION_CREATED", "ANNOTATION_UPDATED"}
MAX_WEBHOOK_BYTES = 4 << 20


class StudioHealthAnswer(BaseModel):
    """The backend's status."""

    status: Literal["UP"]
    model_class: str


class StudioSetupAnswer(BaseModel):
    """The model version used for predictions."""

    model_version: str


class StudioResultAnswer(BaseModel):
    """A prediction in Label Studio's format. A low score means high uncertainty.

    If a task cannot be read, its result is empty and `reason` is the error.
    """

    model_version: str
    score: float | None
    result: list[dict[str, Any]]
    reason: str | None = None


class StudioPredictAnswer(BaseModel):
    """The predictions for all tasks."""

    results: list[StudioResultAnswer]
    model_version: str


class StudioWebhookAnswer(BaseModel):
    """The response to a webhook, which indicates whether a label was stored."""

    kept: bool


async def accept_basic_authentication(request: Request) -> None:
    """Accept the API key as a password. Label Studio only supports basic authentication."""
    kind, _, content = request.headers.get("authorization", "").partition(" ")
    if kind.lower() == "basic" and key_name(request.scope) is None:
        with suppress(ValueError):
            password = b64decode(content.strip(), validate=True).partition(b":")[2]
            authenticate(request.scope, get_context(request).key_ring.keys, password)


router = APIRouter(
    prefix="/label-studio/{name}",
    tags=["Label Studio"],
    dependencies=[Depends(accept_basic_authentication)],
)
JSON_OBJECT_BODY: dict[str, Any] = {
    "requestBody": {"required": True, "content": {JSON: {"schema": {"type": "object"}}}}
}


@router.get("/health", response_model=StudioHealthAnswer, dependencies=[needs("read")])
async def get_label_studio_health(_: ModelName) -> Response:
    """Check that the backend is running."""
    return json_response({"status": "UP", "model_class": "Dubito"})


@router.post(
    "/setup",
    response_model=StudioSetupAnswer,
    openapi_extra=JSON_OBJECT_BODY,
    dependencies=[needs("predict")],
)
async def post_label_studio_setup(request: Request, name: str) -> Response:
    """Check a project's labelling configuration and return the version for predictions."""
    context = get_context(request)
    call = RequestContext.from_request(request, context.settings.deadline_s)
    content = await _read(context, call, MAX_WEBHOOK_BYTES)
    loaded = await context.find_model(call, Envelope(model=name))
    parse_config(content.get("schema"), loaded.model.manifest)
    return json_response({"model_version": model_version(loaded)})


@router.post(
    "/predict",
    response_model=StudioPredictAnswer,
    openapi_extra=JSON_OBJECT_BODY,
    dependencies=[needs("predict")],
)
async def post_label_studio_predict(request: Request, name: str) -> Response:
    """Predict tasks. Label Studio can sort them by score to show uncertain tasks first."""
    context = get_context(request)
    settings, call = context.settings, context.begin(request)
    content = await _read(context, call, limits.MAX_JSON_BYTES)
    envelope = PredictRequest(inputs=[], model=name)
    loaded = await context.find_model(call, envelope)
    manifest = loaded.model.manifest
    config = parse_config(content.get("label_config"), manifest)
    tasks = content.get("tasks")
    if not isinstance(tasks, list) or not tasks:
        raise InvalidInput("tasks", "an array of tasks", "another value or none")
    if len(tasks) > settings.max_rows:
        raise TooLarge("tasks", f"at most {settings.max_rows}", str(len(tasks)))
    x, errors = await context.threads.integrations(
        partial(_read_rows, _fetch, loaded, config, tasks, call)
    )
    work = PredictWork(call, envelope, loaded, x, "tasks", is_live=False, is_encoded=True)
    write = partial(_write_predictions, model_version(loaded), config, errors)
    return response(await predict(context, work, write), JSON)


def _write_predictions(
    version: str,
    config: LabelConfig,
    errors: dict[int, FieldError],
    answer: Answer,
    _pause: Pause,
) -> list[bytes]:
    scores, classes = answer.scores, answer.results.manifest.classes or ()
    if isinstance(scores, Scores):
        values: list[Any] = [classes[i] for i in scores.label.tolist()]
        uncertainties = (scores.entropy / math.log(max(2, len(classes)))).tolist()
    else:
        values = scores.mean.tolist()
        uncertainties = (scores.std / (1.0 + scores.std)).tolist()
    results: list[dict[str, Any]] = [
        {
            "model_version": version,
            "score": 1.0 - min(1.0, uncertainty),
            "result": make_result(config, value),
        }
        for value, uncertainty in zip(values, uncertainties, strict=True)
    ]
    for n, error in errors.items():
        results[n] |= {"score": None, "result": [], "reason": str(error)}
    return [orjson.dumps({"results": results, "model_version": version})]


@router.post(
    "/webhook",
    status_code=201,
    response_model=StudioWebhookAnswer,
    responses={200: {"model": StudioWebhookAnswer}},
    openapi_extra=JSON_OBJECT_BODY,
    dependencies=[needs("label")],
)
async def post_label_studio_webhook(request: Request, name: str, audit: Audit) -> Response:
    """Store the label of a new or changed annotation. Returns 201 if one was stored, else 200."""
    context = get_context(request)
    call = context.begin(request)
    require_json(request)
    content = await _read(context, call, MAX_WEBHOOK_BYTES)
    action = content.get("action")
    if not isinstance(action, str) or action not in LABEL_ACTIONS:
        return json_response({"kept": False})
    loaded = await context.find_model(call, Envelope(model=name))
    is_stored = await context.threads.integrations(
        partial(_store, _fetch, context, loaded, content, call, audit)
    )
    return json_response({"kept": is_stored}, 201 if is_stored else 200)


async def _read(context: Context, call: RequestContext, max_bytes: int) -> dict[str, Any]:
    body = await read_body(call, max_bytes)
    call.reservation.reserve(OBJECT_BYTES * len(body), "body")
    return await context.threads.state(partial(parse_json, body))


def model_version(loaded: ServedModel) -> str:
    return f"{loaded.name}:{loaded.version}"


def _fetch(url: str) -> bytes:
    """Download a file from the configured Label Studio server. This call blocks."""
    if not os.environ.get(URL_VARIABLE):
        expected = f"images as data URIs, since {URL_VARIABLE} is not set"
        raise InvalidInput("tasks", expected, "a URL")
    return _label_studio().fetch(url)


@cache
def _label_studio() -> LabelStudio:
    return label_studio_from_environment()


def _read_rows(
    fetch: Fetch, loaded: ServedModel, config: LabelConfig, tasks: list[Any], call: RequestContext
) -> tuple[Float32[np.ndarray, "N I"], dict[int, FieldError]]:
    """Convert tasks to rows. This call may block while downloading images.

    Also return the errors of unreadable tasks, by index. Another task's row takes their place.

    Raises:
        FieldError: if no task can be read.
    """
    model = loaded.model
    spec = model.manifest.input
    call.reservation.reserve(4 * model.row_size * len(tasks), "tasks")
    x = np.empty((len(tasks), model.row_size), dtype=np.float32)
    errors: dict[int, FieldError] = {}
    for n, task in enumerate(tasks):
        if time.monotonic() > call.deadline:  # Fetching images may be slow.
            raise PastDeadline
        data = task.get("data") if isinstance(task, dict) else None
        try:
            row = read_row(model.manifest, config, data, f"tasks.{n}.data", fetch)
            x[n] = RowReader(spec, "tasks", call, model.text_encoder).read([row], n)[0]
        except (InvalidInput, TooLarge) as error:
            errors[n] = error
    if len(errors) == len(tasks):
        raise errors[0]
    x[list(errors)] = x[next(n for n in range(len(tasks)) if n not in errors)]
    fill_missing(x, spec.columns)
    return x, errors


def _store(
    fetch: Fetch,
    context: Context,
    loaded: ServedModel,
    content: dict[str, Any],
    call: RequestContext,
    audit: AuditLog,
) -> bool:
    """Store a webhook's label. Return False if there is no label. This call blocks.

    A new annotation of a task replaces the previous one.
    """
    manifest = loaded.model.manifest
    project, task = content.get("project"), content.get("task")
    text = project.get("label_config") if isinstance(project, dict) else None
    config = parse_config(text, manifest)
    value = read_annotation(config, content.get("annotation"))
    if value is None:
        return False
    name = label_id(project, task)
    field = "label" if isinstance(value, str) else "target"
    entry = validate(LabelEntry, {"id": name, field: value})
    if not is_saved(context.state, loaded.name, name):
        data = task.get("data") if isinstance(task, dict) else None
        entry.input = read_row(manifest, config, data, "task.data", fetch)
    keep_labels(context, loaded, [entry], call, audit, True)
    return True
