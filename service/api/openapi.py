"""`GET /openapi.json` and `GET /docs`, with the schemas of bodies and errors.

Both routes are open, so their content is built and compressed once.
"""

import base64
import io
from collections.abc import Iterable, Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import orjson
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.routing import APIRoute
from PIL import Image
from pydantic.json_schema import models_json_schema

from model_store.artifacts.manifest import (
    AnyColumn,
    CategoricalColumn,
    InputSpec,
    Manifest,
    TimeColumn,
)
from model_store.conformal.calibration import DEFAULT_FPR
from service.api.dependencies import CurrentContext, LinkPrefix
from service.api.media_types import JSON, PROBLEM_JSON
from service.api.page import StaticContent, StaticResponse
from service.api.problems import Problem
from service.api.requests import FILE_ENDINGS, FORM, NPY, PURPOSE, TEST
from service.api.responses import format_column_time
from service.api.schemas import (
    EXAMPLE_ROW,
    AcquireRequest,
    Envelope,
    LabelsDeletion,
    LabelsRequest,
    PredictJobRequest,
    PredictRequest,
    RequestModel,
)
from service.auth.scopes import OPEN_TO_ALL, needed_scope
from service.context import Context

FORMS: dict[type[RequestModel], str] = {
    PredictRequest: "inputs",
    AcquireRequest: "pool",
    PredictJobRequest: "inputs",
}
SWAGGER_FILES = "/static-offline-docs"
SCHEMAS = "#/components/schemas/"
BINARY = {"type": "string", "format": "binary"}
IN_QUERY = "only if the body is not JSON"
ERRORS: dict[int | str, dict[str, Any]] = {
    "default": {
        "description": "An error, such as 404 (unknown model), 413 (too large), 415 (media type), "
        "422 (invalid), 429 (overloaded), 503 (not ready) or 504 (past the deadline)",
        "content": {PROBLEM_JSON: {"schema": {"$ref": f"{SCHEMAS}Problem"}}},
    }
}
PURPOSE_PARAMETER: dict[str, Any] = {
    "name": PURPOSE,
    "in": "header",
    "schema": {"type": "string", "enum": [TEST]},
    "description": "`test` excludes the rows from drift detection and metrics",
}
# FastAPI does not find these, because the routes parse their bodies themselves.
BODIES = (PredictRequest, AcquireRequest, PredictJobRequest, LabelsRequest, LabelsDeletion, Problem)
MAX_MODELS = 20  # with examples
MAX_EXAMPLE_NUMBERS = 4096  # per row
MAX_PIXELS = 1 << 20  # per example image

router = APIRouter(include_in_schema=False, dependencies=[OPEN_TO_ALL])


@router.get("/openapi.json")
async def get_document(request: Request, context: CurrentContext, prefix: LinkPrefix) -> Response:
    document: OpenApiDocument = request.app.openapi
    return StaticResponse(await context.threads.files(lambda: document.content(prefix)))


@router.get("/docs")
async def get_docs(request: Request, prefix: LinkPrefix) -> Response:
    """Show the OpenAPI document in Swagger UI."""
    return get_swagger_ui_html(
        openapi_url=f"{prefix}/openapi.json",
        title=request.app.title,
        swagger_js_url=f"{prefix}{SWAGGER_FILES}/swagger-ui-bundle.js",
        swagger_css_url=f"{prefix}{SWAGGER_FILES}/swagger-ui.css",
        swagger_favicon_url=f"{prefix}{SWAGGER_FILES}/favicon.png",
    )


def form_name(kind: type[RequestModel]) -> str:
    return kind.__name__.replace("Request", "Form")


def json_body(kind: type[RequestModel]) -> dict[str, Any]:
    values = kind.model_json_schema()["examples"]
    examples = {f"example {i}": {"value": value} for i, value in enumerate(values, start=1)}
    schema = {"$ref": f"{SCHEMAS}{kind.__name__}"}
    content = {JSON: {"schema": schema, "examples": examples}}
    return {"requestBody": {"required": True, "content": content}}


def file_body(kind: type[RequestModel], media_types: Iterable[str]) -> dict[str, Any]:
    content = {media_type: {"schema": BINARY} for media_type in media_types}
    return {
        "requestBody": {"required": True, "content": content},
        "parameters": query_parameters(kind),
    }


def request_body(kind: type[Envelope]) -> dict[str, Any]:
    """Describe a request body: JSON, a form, or a file with options in the query."""
    body = json_body(kind)
    content = body["requestBody"]["content"]
    content |= {media: {"schema": BINARY} for media in (NPY, *FILE_ENDINGS)}
    content[FORM] = {"schema": {"$ref": f"{SCHEMAS}{form_name(kind)}"}}
    parameters = query_parameters(kind, excluded=FORMS[kind])
    return {**body, "parameters": [{**each, "description": IN_QUERY} for each in parameters]}


def query_parameters(kind: type[RequestModel], excluded: str = "") -> list[dict[str, Any]]:
    return [
        {"name": name, "in": "query", "schema": query_schema(schema)}
        for name, schema in kind.model_json_schema()["properties"].items()
        if name != excluded
    ]


def query_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Convert a field's schema to a query parameter's schema, which cannot be null."""
    kind = schema.get("anyOf", [schema])[0]
    if kind["type"] == "object":
        return {"type": "string", "contentMediaType": JSON}
    return without_default({k: v for k, v in schema.items() if k != "anyOf"} | kind)


def without_default(schema: dict[str, Any]) -> dict[str, Any]:
    """Remove the default from a schema, because some clients would send it."""
    return {name: value for name, value in schema.items() if name != "default"}


class OpenApiDocument:
    """The OpenAPI document, which is rebuilt if the served models change."""

    def __init__(self, app: FastAPI, context: Context, routes: Sequence[APIRoute]) -> None:
        self._build = app.openapi
        self._context = context
        self._routes = routes
        self._document: dict[str, Any] = {}
        self._contents: dict[str, StaticContent] = {}  # by prefix
        self._versions: list[tuple[str, str]] | None = None  # with examples in `_document`

    def __call__(self) -> dict[str, Any]:
        keys, models = self._context.key_ring.keys, self._context.models
        # With keys, the names of models are not public.
        names = models.names()[:MAX_MODELS] if keys.api_is_open else []
        manifests = [manifest for manifest in map(models.latest, names) if manifest is not None]
        versions = [(manifest.name, manifest.version) for manifest in manifests]
        if versions != self._versions:
            document = deepcopy(self._build())
            _remove_null(document)
            _add_schemas(document)
            _add_examples(document, manifests)
            if keys.names:
                _add_keys(document, self._routes, keys.api_is_open)
            self._document, self._versions, self._contents = document, versions, {}
        return self._document

    def content(self, prefix: str) -> StaticContent:
        """Return the document as JSON, with a prefix for links.

        The first call for each prefix is slow.
        """
        document, contents = self(), self._contents
        if prefix not in contents:
            servers = {"servers": [{"url": prefix}]} if prefix else {}
            contents[prefix] = StaticContent(orjson.dumps({**document, **servers}), JSON)
        return contents[prefix]


def _remove_null(document: dict[str, Any]) -> None:
    """Remove `null` from the schemas of query parameters."""
    for operations in document["paths"].values():
        for operation in operations.values():
            for parameter in operation.get("parameters", ()):
                if parameter["in"] == "query":
                    parameter["schema"] = query_schema(parameter["schema"])


def _add_schemas(document: dict[str, Any]) -> None:
    """Add the schemas for request bodies and errors."""
    _, generated = models_json_schema(
        [(kind, "validation") for kind in BODIES], ref_template=f"{SCHEMAS}{{model}}"
    )
    schemas = generated["$defs"]
    for schema in schemas.values():
        schema.pop("examples", None)
    for kind, rows_field in FORMS.items():
        schema = schemas[kind.__name__]
        files = {
            "type": "array",
            "items": BINARY,
            "minItems": 1,
            "description": "PNG, JPEG, WebP or BMP files, for image models",
        }
        fields = {name: without_default(field) for name, field in schema["properties"].items()}
        form = {**schema, "title": form_name(kind), "properties": {**fields, rows_field: files}}
        schemas[form_name(kind)] = form
    document["components"]["schemas"] |= schemas


def _add_keys(document: dict[str, Any], routes: Sequence[APIRoute], api_is_open: bool) -> None:
    """Describe the API keys and the scope that each route needs."""
    document["components"]["securitySchemes"] = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "key": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
    }
    for route in routes:
        needed = needed_scope(route)
        if not route.include_in_schema or needed is None or (api_is_open and needed != "admin"):
            continue
        for method in route.methods or ():
            operation = document["paths"][route.path][method.lower()]
            operation["security"] = [{"bearer": [needed]}, {"key": [needed]}]


def _add_examples(document: dict[str, Any], manifests: Sequence[Manifest]) -> None:
    """Add example requests for the served models."""
    rows = [(manifest, _example_row(manifest.input)) for manifest in manifests]
    rows = [(manifest, row) for manifest, row in rows if row is not None]
    for path, make in (("/predict", _predict), ("/acquire", _acquire), ("/labels", _labels)):
        examples: dict[str, Any] = {}
        for manifest, row in rows:
            examples |= {title: {"value": value} for title, value in make(manifest, row).items()}
        if examples and path in document["paths"]:
            content = document["paths"][path]["post"]["requestBody"]["content"]
            content[JSON]["examples"] = examples


def _example_row(spec: InputSpec) -> Any:
    """Return a typical row for a model, or None if rows are too long for an example."""
    if spec.text is not None:
        return "a text"
    if spec.columns:
        return {column.name: _value(column) for column in spec.columns}
    if (spec.shape, spec.minimum, spec.maximum) == ((8, 8), 0.0, 16.0):  # scikit-learn's digits
        return EXAMPLE_ROW
    if np.prod(spec.shape) <= MAX_EXAMPLE_NUMBERS:
        middle = spec.minimum / 2 + spec.maximum / 2
        return np.full(spec.shape, int(middle) if spec.takes_ids else middle).tolist()
    if spec.image is None or np.prod(spec.shape[-2:]) > MAX_PIXELS:
        return None
    file = io.BytesIO()
    height, width = spec.shape[-2:]
    grey = 128 if spec.image.mode == "L" else (128, 128, 128)
    Image.new(spec.image.mode, (width, height), grey).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def _value(column: AnyColumn) -> float | str:
    if isinstance(column, CategoricalColumn):
        return column.categories[0]
    if isinstance(column, TimeColumn):
        return format_column_time(column, column.mean)
    return float(f"{column.mean:.4g}")


def _predict(manifest: Manifest, row: Any) -> dict[str, Any]:
    name, smallest = manifest.name, manifest.detectors.smallest_fpr
    plain = {"model": name, "inputs": [row]}
    if smallest > DEFAULT_FPR:
        return {name: {**plain, "fpr": smallest}}
    draws = {"num_samples": manifest.noise.default_draws, "seed": 7}
    options = {**draws, "fpr": DEFAULT_FPR, "coverage": 0.95}
    return {
        name: plain,
        f"{name}, with options": {**plain, "version": "latest", **options},
        f"{name}, two rows, a false discovery rate": {**plain, "inputs": [row, row], "fdr": 0.1},
    }


def _acquire(manifest: Manifest, row: Any) -> dict[str, Any]:
    pool = {"pool": [row, row], "ids": ["one", "another"]}
    return {manifest.name: {"model": manifest.name, **pool, "k": 1, "seed": 7}}


def _labels(manifest: Manifest, row: Any) -> dict[str, Any]:
    value = {"target": 0.0} if manifest.classes is None else {"label": manifest.classes[0]}
    label = {"id": "one", **value, "input": row}
    return {manifest.name: {"model": manifest.name, "labels": [label]}}
