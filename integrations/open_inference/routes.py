"""Routes for the Open Inference Protocol over REST, under `/v2`.

The protocol has its own specification, so our OpenAPI document does not include these routes. See
`docs/open-inference.md`.
"""

import asyncio
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
    read_rows,
)
from integrations.requests import build_envelope
from model_store.artifacts.manifest import Manifest
from model_store.artifacts.store import LATEST
from model_store.errors import InvalidInput, TooLarge
from model_store.types import Content
from model_store.version import VERSION
from service import limits
from service.api.health import check_ready
from service.api.media_types import JSON
from service.api.predict import PredictWork, predict
from service.api.problems import ErrorForm, register_error_form
from service.api.requests import (
    header,
    parse_json,
    read_body,
    run_parser,
)
from service.api.responses import json_response, response
from service.auth.scopes import OPEN_TO_ALL, needs
from service.context import AllowedModels, Context, CurrentContext, ModelName, get_context
from service.errors import NotReady, Unsupported
from service.models.models import Models
from service.request_context import RequestContext

EXTENSIONS = ["binary_tensor_data", "parameters", "model_repository"]
BINARY = "application/octet-stream"
MAX_INDEX_BYTES = 64 << 10
WINDOWS = {"gzip": 31, "deflate": 15}  # zlib's window bits by Content-Encoding
STEP_BYTES = 256 << 10  # inflated in about a millisecond

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
    check_ready(get_context(request))
    return json_response({"ready": True})


@router.get("/models", dependencies=READ)
async def get_models(context: CurrentContext, allowed: AllowedModels) -> Response:
    return json_response({"models": context.models.names(allowed)})


@router.get("/models/{name}", dependencies=READ)
@router.get("/models/{name}/versions/{version}", dependencies=READ)
async def get_model(context: CurrentContext, name: ModelName, version: str = LATEST) -> Response:
    manifest = await context.threads.files(partial(_manifest, context.models, name, version))
    versions = await context.threads.files(partial(context.models.store.versions, name))
    return json_response(model_metadata(manifest, versions))


@router.get("/models/{name}/config", dependencies=READ)
@router.get("/models/{name}/versions/{version}/config", dependencies=READ)
async def get_config(context: CurrentContext, name: ModelName, version: str = LATEST) -> Response:
    manifest = await context.threads.files(partial(_manifest, context.models, name, version))
    return json_response(triton_config(manifest, context.settings.max_rows))


@router.get("/models/{name}/ready", dependencies=READ)
@router.get("/models/{name}/versions/{version}/ready", dependencies=READ)
async def get_model_ready(
    context: CurrentContext, name: ModelName, version: str = LATEST
) -> Response:
    await context.threads.files(partial(_refuse_unready_version, context.models, name, version))
    return json_response({"name": name, "ready": True})


@router.post("/repository/index", dependencies=READ)
async def post_index(request: Request, context: CurrentContext, allowed: AllowedModels) -> Response:
    call = RequestContext.from_request(request, context.settings.deadline_s)
    body = await read_body(call, MAX_INDEX_BYTES)
    content = parse_json(body) if body[:].strip() else {}
    ready_only = content.get("ready", False)
    if content.keys() - {"ready"} or type(ready_only) is not bool:
        raise InvalidInput("body", "an empty body, or an object with `ready`: a boolean", "another")
    index = await context.threads.files(partial(_index, context.models, allowed))
    return json_response([entry for entry in index if not ready_only or entry["state"] == "READY"])


@router.post("/models/{name}/infer", dependencies=[needs("predict")])
@router.post("/models/{name}/versions/{version}/infer", dependencies=[needs("predict")])
async def post_infer(request: Request, name: str, version: str = LATEST) -> Response:
    context = get_context(request)
    call = context.begin(request, has_rows=True)
    work, infer = await _read(context, call, name, version)
    encoder = TensorEncoder(infer, call.record.request_id)
    answer = await predict(context, work, encoder)
    return response(answer, BINARY if encoder.headers else JSON, encoder.headers)


async def read_inflated(call: RequestContext, max_bytes: int) -> Content:
    """Read and decompress a request body of up to `max_bytes`.

    Memory for each step of `STEP_BYTES` is reserved before it is inflated.

    Raises:
        TooLarge, Overloaded: as `read_body`, before inflating more bytes.
        Unsupported: for another encoding.
        InvalidInput: if the compressed body is damaged or followed by other bytes.
    """
    coding = header(call.request, b"content-encoding", "identity").strip().lower()
    if coding == "identity":
        return await read_body(call, max_bytes)
    if coding not in WINDOWS:
        raise Unsupported("Content-Encoding", f"none, {' or '.join(WINDOWS)}", "another")
    error = InvalidInput("body", f"a body compressed with {coding} (Content-Encoding)", "another")
    inflater, body = zlib.decompressobj(WINDOWS[coding]), bytearray()
    async for part in call.request.stream():
        left, inflated = part, None
        # zlib may keep output back after a full step.
        while left or inflated is None or len(inflated) == STEP_BYTES:
            call.reservation.acquire(STEP_BYTES)
            try:
                inflated = inflater.decompress(left, STEP_BYTES)
            except zlib.error:
                raise error from None
            call.reservation.release(STEP_BYTES - len(inflated))
            if len(body) + len(inflated) > max_bytes:
                raise TooLarge("body", f"at most {max_bytes} bytes when inflated", "more")
            body += inflated
            if inflater.unused_data:
                raise error
            left = inflater.unconsumed_tail
            await asyncio.sleep(0)  # Lets other requests run, as a part may inflate to many bytes.
    if not inflater.eof:
        raise error
    return body


async def _read(
    context: Context, call: RequestContext, name: str, version: str
) -> tuple[PredictWork, InferRequest]:
    settings, request = context.settings, call.request
    if request.query_params:
        raise InvalidInput("query", "no parameters, as they belong in the body", "some")
    is_json = HEADER_LENGTH not in request.headers
    body = await read_inflated(call, limits.MAX_JSON_BYTES if is_json else settings.max_body_bytes)
    length = header_length(request.headers, body)
    parse = partial(read_infer, body, length, limits.MAX_JSON_BYTES, call)
    size = len(body) if length is None else length
    infer = await run_parser(context, call, size, parse)
    del body, parse  # frees the memory of the body
    envelope = build_envelope({**infer.fields, "model": name, "version": version}, "parameters")
    loaded = await context.find_model(call, envelope)
    manifest, max_rows = loaded.model.manifest, settings.max_rows
    tensors, is_passed_on = infer.tensors, infer.is_passed_on
    make = partial(read_rows, tensors, manifest, max_rows, is_passed_on, call)
    size += sum(len(tensor.content) for tensor in infer.tensors if tensor.content is not None)
    rows, groups = await run_parser(context, call, size, make)
    infer.tensors.clear()
    if groups is not None:
        envelope = envelope.model_copy(update={"groups": groups})
    return PredictWork(call, envelope, loaded, rows), infer


def _manifest(models: Models, name: str, version: str) -> Manifest:
    """Return a version's manifest. `latest` means the loaded version, if there is one."""
    latest = models.latest(name)
    if version == LATEST and latest is not None:
        return latest
    return models.store.manifest(name, models.resolve(name, version))


def _refuse_unready_version(models: Models, name: str, version: str) -> None:
    """Raise NotReady if the version cannot be served."""
    if models.peek(name, version) is not None:
        return
    manifest = _manifest(models, name, version)
    broken = models.errors(manifest.name).get(manifest.version)
    if broken is not None:
        raise NotReady(broken)


def _index(models: Models, allowed: frozenset[str] | None) -> list[dict[str, Any]]:
    """List all versions of the allowed models, with their states."""
    index = []
    for name in models.names(allowed):
        broken = models.errors(name)
        for version in models.store.versions(name):
            reason = broken.get(version, "")
            state = "UNAVAILABLE" if reason else "READY"
            index.append({"name": name, "version": version, "state": state, "reason": reason})
    return index
