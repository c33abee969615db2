"""The routes `/v2` of the Open Inference Protocol over REST.

It has a published specification, so these routes are not in our OpenAPI document;
`docs/open-inference.md` describes them.
"""

import asyncio
import time
import zlib
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response

from integrations.open_inference.answers import TensorEncoder, model_metadata, triton_config
from integrations.open_inference.requests import (
    HEADER_LENGTH,
    InferRequest,
    header_length,
    read_infer,
    rows_of,
)
from model_store.artifacts.manifest import Manifest
from model_store.artifacts.store import LATEST
from model_store.errors import InvalidInput
from service import VERSION, limits
from service.api.health import refuse_unready
from service.api.media_types import JSON
from service.api.predict import PredictWork, predict
from service.api.problems import ErrorForm, register_error_form
from service.api.requests import body_parts, envelope_of, header, parse_json, read_body, run_reading
from service.api.responses import json_response, response
from service.auth.scopes import OPEN_TO_ALL, needs
from service.context import Context, context_of
from service.errors import NotReady, TooLarge, Unsupported
from service.models.models import Models
from service.request_context import RequestContext

EXTENSIONS = ["binary_tensor_data", "parameters", "model_repository"]
BINARY = "application/octet-stream"
MAX_INDEX_BYTES = 64 << 10
WINDOWS = {"gzip": 31, "deflate": 15}  # of zlib, by the encoding of a body
INFLATED_AT_ONCE = 256 << 10  # bytes: a millisecond or so

register_error_form(
    ErrorForm(
        lambda path: path == "/v2" or path.startswith("/v2/"),
        lambda _, detail: {"error": detail},
        "docs/open-inference.md",
    )
)

router = APIRouter(prefix="/v2", include_in_schema=False)
READ = [needs("read")]


@router.get("", dependencies=READ)
async def get_server() -> Response:
    return json_response({"name": "dubito", "version": VERSION, "extensions": EXTENSIONS})


@router.get("/health/live", dependencies=[OPEN_TO_ALL])
async def get_live() -> Response:
    return json_response({"live": True})


@router.get("/health/ready", dependencies=[OPEN_TO_ALL])
async def get_ready(request: Request) -> Response:
    refuse_unready(context_of(request))
    return json_response({"ready": True})


@router.get("/models", dependencies=READ)
async def get_models(request: Request) -> Response:
    return json_response({"models": context_of(request).models.names()})


@router.get("/models/{name}", dependencies=READ)
@router.get("/models/{name}/versions/{version}", dependencies=READ)
async def get_model(request: Request, name: str, version: str = LATEST) -> Response:
    context = context_of(request)
    manifest = await context.threads.files(partial(_manifest, context.models, name, version))
    versions = await context.threads.files(partial(context.models.store.versions, name))
    return json_response(model_metadata(manifest, versions))


@router.get("/models/{name}/config", dependencies=READ)
@router.get("/models/{name}/versions/{version}/config", dependencies=READ)
async def get_config(request: Request, name: str, version: str = LATEST) -> Response:
    context = context_of(request)
    manifest = await context.threads.files(partial(_manifest, context.models, name, version))
    return json_response(triton_config(manifest, context.settings.max_rows))


@router.get("/models/{name}/ready", dependencies=READ)
@router.get("/models/{name}/versions/{version}/ready", dependencies=READ)
async def get_model_ready(request: Request, name: str, version: str = LATEST) -> Response:
    context = context_of(request)
    await context.threads.files(partial(_refuse_unready_version, context.models, name, version))
    return json_response({"name": name, "ready": True})


@router.post("/repository/index", dependencies=READ)
async def post_index(request: Request) -> Response:
    context = context_of(request)
    call = RequestContext.from_request(request, context.settings.deadline_s)
    body = await read_body(call, MAX_INDEX_BYTES)
    content = parse_json(body) if body.strip() else {}
    only_ready = content.get("ready", False)
    if content.keys() - {"ready"} or type(only_ready) is not bool:
        raise InvalidInput("body", "nothing, or an object of ready, true or false", "another")
    index = await context.threads.files(partial(_index, context.models))
    return json_response([entry for entry in index if not only_ready or entry["state"] == "READY"])


@router.post("/models/{name}/infer", dependencies=[needs("predict")])
@router.post("/models/{name}/versions/{version}/infer", dependencies=[needs("predict")])
async def post_infer(request: Request, name: str, version: str = LATEST) -> Response:
    context = context_of(request)
    call = context.begin(request, has_rows=True)
    asked, infer = await _read(context, call, name, version)
    encoder = TensorEncoder(infer, call.record.request_id)
    answer = await predict(context, asked, encoder)
    return response(answer, BINARY if encoder.headers else JSON, encoder.headers)


async def read_inflated(call: RequestContext, limit: int) -> bytes | bytearray:
    """Read a request's body of at most `limit` bytes, which may be compressed by gzip or deflate
    (zlib).

    Memory for each step of `INFLATED_AT_ONCE` is reserved before it is inflated.

    Raises:
        TooLarge, Overloaded: before more than that is inflated and kept, as `read_body`.
        Unsupported: if it is encoded otherwise.
        InvalidInput: if it is not one whole compressed body.
    """
    coding = header(call.request, b"content-encoding", "identity").strip().lower()
    if coding == "identity":
        return await read_body(call, limit)
    if coding not in WINDOWS:
        raise Unsupported("Content-Encoding", f"none, {' or '.join(WINDOWS)}", "another")
    wrong = InvalidInput(
        "body", f"one body compressed by {coding}, as its Content-Encoding says", "something else"
    )
    inflater, body = zlib.decompressobj(WINDOWS[coding]), bytearray()
    async for part in body_parts(call.request):
        left, inflated = part, None
        # after a full step there may be more
        while left or inflated is None or len(inflated) == INFLATED_AT_ONCE:
            call.reservation.acquire(INFLATED_AT_ONCE)
            try:
                inflated = inflater.decompress(left, INFLATED_AT_ONCE)
            except zlib.error:
                raise wrong from None
            call.reservation.release(INFLATED_AT_ONCE - len(inflated))
            if len(body) + len(inflated) > limit:
                raise TooLarge("body", f"at most {limit} bytes once inflated", "more")
            body += inflated
            if inflater.unused_data:
                raise wrong
            left = inflater.unconsumed_tail
            await asyncio.sleep(0)  # other requests' turn: a small part may inflate to much
    if not inflater.eof:
        raise wrong
    return body


async def _read(
    context: Context, call: RequestContext, name: str, version: str
) -> tuple[PredictWork, InferRequest]:
    settings, request = context.settings, call.request
    if request.query_params:  # which would be ignored silently
        raise InvalidInput("query", "nothing, since parameters stand in the body", "parameters")
    is_json = HEADER_LENGTH not in request.headers
    body = await read_inflated(call, limits.MAX_JSON_BYTES if is_json else settings.max_body_bytes)
    length = header_length(request.headers, body)
    work = partial(read_infer, body, length, limits.MAX_JSON_BYTES, call)
    size = len(body) if length is None else length
    infer = await run_reading(context, call, size, work)
    del body, work
    call.record.read = time.perf_counter()
    envelope = envelope_of({**infer.fields, "model": name, "version": version}, "parameters")
    served = await context.find_model(call, envelope)
    manifest, most_rows = served.model.manifest, settings.max_rows
    tensors, is_passed_on, encoded = infer.tensors, infer.is_passed_on, envelope.encoded
    make = partial(rows_of, tensors, manifest, most_rows, is_passed_on, call, encoded)
    size += sum(len(tensor.content) for tensor in infer.tensors if tensor.content is not None)
    rows, groups = await run_reading(context, call, size, make)
    infer.tensors.clear()
    if groups is not None:
        envelope = envelope.model_copy(update={"groups": groups})
    return PredictWork(call, envelope, served, rows), infer


def _manifest(models: Models, name: str, version: str) -> Manifest:
    """Return the manifest of a version; `latest` is the served version. Reads files."""
    name = models.name(name)
    latest = models.latest(name)
    if version == LATEST and latest is not None:
        return latest
    return models.store.manifest(name, models.resolve(name, version))


def _refuse_unready_version(models: Models, name: str, version: str) -> None:
    """Raise unless a version is in memory or can be loaded. Reads files."""
    if models.peek(name, version) is not None:
        return
    manifest = _manifest(models, name, version)
    broken = models.broken(manifest.name).get(manifest.version)
    if broken is not None:
        raise NotReady(broken)


def _index(models: Models) -> list[dict[str, Any]]:
    """List all versions of all models. Unloaded versions are ready: a request loads them."""
    index = []
    for name in models.names():
        broken = models.broken(name)
        for version in models.store.versions(name):
            reason = broken.get(version, "")
            state = "UNAVAILABLE" if reason else "READY"
            index.append({"name": name, "version": version, "state": state, "reason": reason})
    return index
