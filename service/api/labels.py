"""Routes for labels and live quality."""

from dataclasses import asdict
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Query, Response
from pydantic import BaseModel, ConfigDict, Field

from model_store.artifacts.manifest import Manifest
from model_store.errors import MAX_ERRORS, InvalidInput, TooLarge, describe_value, merge_errors
from model_store.sources.cells import match_category
from model_store.sources.columns import fill_missing
from model_store.sources.rows import RowReader
from model_store.state.labels import (
    Label,
    accept,
    candidates,
    check_id,
    control_labels,
    counts,
    delete_labels,
    kept_labels,
    row_format,
)
from model_store.state.live import MIN_CONTROL_ROWS, live_figures
from model_store.types import JsonObject
from service.api.openapi import json_body
from service.api.requests import Validated, parse_json, read_body, require_json, validate
from service.api.responses import format_timestamp, json_response
from service.api.schemas import (
    Envelope,
    LabelEntry,
    LabelsDeletion,
    LabelsRequest,
    ModelNameRequest,
    Timestamp,
)
from service.auth.scopes import allowed_models, key_name, needs
from service.context import AllowedModels, Audit, Context, CurrentContext, CurrentRequest, ModelName
from service.models.models import ServedModel
from service.request_context import RequestContext
from service.telemetry.logs import AuditLog

MAX_BODY_BYTES = 4 << 20
OBJECT_BYTES = 16  # memory per byte of JSON
NO_COUNTS = {"acquired": 0, "waiting": 0, "labels": 0, "control_labels": 0}


class LabelsAnswer(BaseModel):
    """The numbers of new, unchanged, replaced and stored labels."""

    model: str
    accepted: int
    known: int
    replaced: int
    labels: int


class LabelsQuery(ModelNameRequest):
    """The query parameters of GET /labels."""

    model_config = ConfigDict(strict=False)

    annotator: str | None = None
    """return only the labels sent with the API key of this name"""

    former: bool = False
    """list replaced and deleted labels instead"""

    after: int = Field(default=0, ge=0, lt=1 << 63)
    """`next` of the previous page"""

    limit: int = Field(default=1000, ge=1, le=10_000)
    """maximum number of labels"""


class KeptLabel(BaseModel):
    """A stored label. `annotator` is the name of the API key that sent it.

    Former labels also have the time and API key of their replacement or deletion.
    """

    id: str
    label: str | None
    target: float | None
    annotator: str | None
    time: Timestamp
    control: bool
    comment: str | None
    ended: Timestamp | None = None
    ended_by: str | None = None


class LabelListAnswer(BaseModel):
    """A page of labels. `next` is null on the last page."""

    model: str
    labels: list[KeptLabel]
    next: int | None


class LabelsDeletedAnswer(BaseModel):
    """The numbers of deleted and remaining labels."""

    model: str
    deleted: int
    labels: int


class FigureAnswer(BaseModel):
    """An estimate with its 95 % confidence interval."""

    value: float
    interval: Annotated[list[float], Field(min_length=2, max_length=2)]


class LiveAnswer(BaseModel):
    """A version's live quality, measured on its control rows.

    `figures` is null if there are too few control rows.
    """

    version: str
    serving: bool
    control_labels: int
    figures: dict[str, FigureAnswer] | None


class CandidateAnswer(BaseModel):
    """A comparison of a candidate with the version `against` on test and control rows."""

    version: str
    against: str
    labels: int
    control_labels: int
    promoted: bool
    time: Timestamp
    reason: str
    test: JsonObject | None = None
    control: JsonObject | None


class LabelFiguresAnswer(BaseModel):
    """Label counts and live quality."""

    model: str
    acquired: int
    waiting: int
    labels: int
    control_labels: int
    live: list[LiveAnswer]
    candidates: list[CandidateAnswer]


router = APIRouter(tags=["Labels"])


@router.post(
    "/labels",
    response_model=LabelsAnswer,
    openapi_extra=json_body(LabelsRequest),
    dependencies=[needs("label")],
)
async def post_labels(context: CurrentContext, call: CurrentRequest, audit: Audit) -> JsonObject:
    """Store either all of the labels or none. Repeating a request has no effect."""
    envelope = await _read(context, call, LabelsRequest)
    count, max_labels = len(envelope.labels), context.settings.max_rows
    if count > max_labels:
        raise TooLarge("labels", f"at most {max_labels}", str(count))
    loaded = await context.find_model(call, Envelope(model=envelope.model))
    replace = envelope.replace
    work = partial(keep_labels, context, loaded, envelope.labels, call, audit, replace)
    return await context.threads.state(work)


async def _read(context: Context, call: RequestContext, kind: type[Validated]) -> Validated:
    require_json(call.request)
    body = await read_body(call, MAX_BODY_BYTES)
    call.reservation.reserve(OBJECT_BYTES * len(body), "body")
    return await context.threads.state(lambda: validate(kind, parse_json(body)))


@router.get("/labels", response_model=LabelListAnswer, dependencies=[needs("label")])
async def get_labels(
    context: CurrentContext, allowed: AllowedModels, query: Annotated[LabelsQuery, Query()]
) -> Response:
    """List a model's labels, oldest first."""
    name = context.models.name(query.model, allowed)

    def read() -> list[JsonObject]:
        state = context.find_state()
        if state is None:
            return []
        options = query.after, query.limit + 1, query.former
        return kept_labels(state, name, query.annotator, *options)

    rows = await context.threads.state(read)
    labels = rows[: query.limit]
    after = labels[-1]["place"] if len(rows) > len(labels) else None
    for label in labels:
        del label["place"]
        for field in {"time", "ended"} & label.keys():
            label[field] = format_timestamp(label[field])
    return json_response({"model": name, "labels": labels, "next": after})


@router.post(
    "/labels/delete",
    response_model=LabelsDeletedAnswer,
    openapi_extra=json_body(LabelsDeletion),
    dependencies=[needs("label")],
)
async def post_labels_delete(
    context: CurrentContext, call: CurrentRequest, audit: Audit
) -> JsonObject:
    """Delete labels by row id. Ids without a label are skipped."""
    request = await _read(context, call, LabelsDeletion)

    def delete() -> JsonObject:
        name = context.models.name(request.model, allowed_models(call.request.scope))
        state = context.find_state()
        if state is None:
            return {"model": name, "deleted": 0, "labels": 0}
        count = delete_labels(state, name, request.ids, key_name(call.request.scope))
        labels = counts(state, name)["labels"]
        audit("delete labels", name, None, labels + count, labels)
        return {"model": name, "deleted": count, "labels": labels}

    return await context.threads.state(delete)


def keep_labels(
    context: Context,
    loaded: ServedModel,
    entries: list[LabelEntry],
    call: RequestContext,
    audit: AuditLog,
    replace: bool,
) -> JsonObject:
    """Store all of a request's labels or none. Return the response.

    This reads and writes files, so call it from a worker thread.
    """
    manifest, ids = loaded.model.manifest, set[str]()
    labels, invalid = list[Label](), list[InvalidInput]()
    for n, entry in enumerate(entries):
        try:
            check_id(entry.id, f"labels.{n}.id")
            if entry.id in ids:
                raise InvalidInput(f"labels.{n}.id", "a unique id", "a repeated one")
            ids.add(entry.id)
            row = _row(loaded, entry, n, call)
            labels.append(Label(entry.id, label_value(manifest, entry, n), row, entry.comment))
        except InvalidInput as error:
            invalid.append(error)
            if len(invalid) == MAX_ERRORS:
                break
    if invalid:
        raise merge_errors(invalid)
    key, rows = key_name(call.request.scope), row_format(manifest)
    accepted = accept(context.state, loaded.name, rows, labels, replace, key)
    after = asdict(accepted)
    audit("store labels", *loaded.key, accepted.labels - accepted.accepted, after)
    context.metrics.count_labels(loaded.name, accepted)
    return {"model": loaded.name, **after}


def label_value(manifest: Manifest, entry: LabelEntry, n: int) -> str | float:
    """Return a label's class or, for regression, its target."""
    field, other = ("target", "label") if manifest.classes is None else ("label", "target")
    if getattr(entry, other) is not None:
        kind = "a string" if field == "label" else "a number"
        expected = f"no {other} for {manifest.task} ({manifest.name}); set `{field}` to {kind}"
        raise InvalidInput(f"labels.{n}.{other}", expected, "one")
    value: str | float | None = getattr(entry, field)
    if value is None:
        raise InvalidInput(f"labels.{n}.{field}", "a value", "none")
    if manifest.classes is not None and value not in manifest.classes:
        match = match_category(str(value), frozenset(manifest.classes))
        if match in manifest.classes:
            return match
        first = list(manifest.classes[:20])
        remaining = len(manifest.classes) - len(first)
        ending = f" and {remaining} more" if remaining else ""
        expected = f"one of the classes {first}{ending} (a new class needs a new fit)"
        raise InvalidInput(f"labels.{n}.label", expected, describe_value(value))
    return value


def _row(loaded: ServedModel, entry: LabelEntry, n: int, call: RequestContext) -> Any:
    if entry.input is None:
        return None
    model = loaded.model
    call.reservation.reserve(4 * model.row_size, "labels")
    spec, encoder = model.manifest.input, model.text_encoder
    try:
        x = RowReader(spec, "input", call, encoder).read_all([entry.input])
        fill_missing(x, spec.columns)
        return x[0]
    except InvalidInput as error:
        path = f"labels.{n}.input"
        raise error.rename_fields(
            lambda f: path + f.removeprefix("input").removeprefix(".0")
        ) from None


@router.get(
    "/models/{name}/labels", response_model=LabelFiguresAnswer, dependencies=[needs("read")]
)
async def get_label_figures(context: CurrentContext, name: ModelName) -> JsonObject:
    """Count a model's labels and evaluate its versions on control rows."""
    return await context.threads.state(partial(_figures, context, name))


def _figures(context: Context, name: str) -> JsonObject:
    latest = context.models.latest(name)
    serving = None if latest is None else latest.version
    database = context.find_state()
    if database is None:
        numbers, rows, tried = NO_COUNTS, [], []
    else:
        numbers, rows = counts(database, name), control_labels(database, name)
        tried = [{**c, "time": format_timestamp(c["time"])} for c in candidates(database, name)]
    by_version: dict[str, list[tuple[JsonObject, str | float]]] = {}
    if serving is not None:
        by_version[serving] = []
    for version, prediction, value in rows:
        by_version.setdefault(version, []).append((prediction, value))
    live = [
        {
            "version": version,
            "serving": version == serving,
            "control_labels": len(pairs),
            "figures": live_figures(pairs) if len(pairs) >= MIN_CONTROL_ROWS else None,
        }
        for version, pairs in sorted(by_version.items(), key=lambda item: -int(item[0]))
    ]
    return {"model": name, **numbers, "live": live, "candidates": tried}
