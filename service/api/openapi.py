"""`GET /openapi.json` and `GET /docs`, with the schemas of bodies and errors.

Both routes are open, so their content is built and compressed once.
"""

from collections.abc import Iterable, Sequence
from functools import cached_property

import orjson
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from model_store.types import JsonObject
from service.api.media_types import FILE_ENDINGS, FORM, JSON, NPY, PROBLEM_JSON
from service.api.page import StaticContent, StaticResponse
from service.api.problems import Problem
from service.api.requests import PURPOSE, TEST
from service.api.schemas import (
    AcquireRequest,
    Envelope,
    LabelsDeletion,
    LabelsRequest,
    PredictJobRequest,
    PredictRequest,
    RequestModel,
)
from service.auth.keys import Keys
from service.auth.scopes import OPEN_TO_ALL, needed_scope
from service.context import CurrentContext, LinkPrefix

SWAGGER_FILES = "/static-offline-docs"
SCHEMAS = "#/components/schemas/"
BINARY = {"type": "string", "format": "binary"}
FILES = {"type": "array", "items": BINARY, "minItems": 1}
ROWS_FIELDS: dict[type[Envelope], str] = {
    PredictRequest: "inputs",
    AcquireRequest: "pool",
    PredictJobRequest: "inputs",
}
IN_QUERY = "only if the body is not JSON"
ERRORS: dict[int | str, JsonObject] = {
    "default": {
        "description": "An error, such as 404 (unknown model), 413 (too large), 415 (media type), "
        "422 (invalid), 429 (overloaded), 503 (not ready) or 504 (past the deadline)",
        "content": {PROBLEM_JSON: {"schema": {"$ref": f"{SCHEMAS}Problem"}}},
    }
}
PURPOSE_PARAMETER: JsonObject = {
    "name": PURPOSE,
    "in": "header",
    "schema": {"type": "string", "enum": [TEST]},
    "description": "`test` excludes the rows from drift detection and metrics",
}
# FastAPI does not find these, because the routes parse their bodies themselves.
BODIES: tuple[type[BaseModel], ...] = (*ROWS_FIELDS, LabelsRequest, LabelsDeletion, Problem)

router = APIRouter(include_in_schema=False, dependencies=[OPEN_TO_ALL])


@router.get("/openapi.json")
async def get_document(request: Request, context: CurrentContext, prefix: LinkPrefix) -> Response:
    document: OpenApiDocument = request.app.openapi
    return StaticResponse(await context.threads.files(lambda: document.content(prefix)))


@router.get("/docs")
async def get_docs(request: Request, prefix: LinkPrefix) -> Response:
    return get_swagger_ui_html(
        openapi_url=f"{prefix}/openapi.json",
        title=request.app.title,
        swagger_js_url=f"{prefix}{SWAGGER_FILES}/swagger-ui-bundle.js",
        swagger_css_url=f"{prefix}{SWAGGER_FILES}/swagger-ui.css",
        swagger_favicon_url=f"{prefix}{SWAGGER_FILES}/favicon.png",
    )


def json_body(kind: type[RequestModel]) -> JsonObject:
    values = kind.model_json_schema()["examples"]
    examples = {f"example {i}": {"value": value} for i, value in enumerate(values, start=1)}
    schema = {"$ref": f"{SCHEMAS}{kind.__name__}"}
    content = {JSON: {"schema": schema, "examples": examples}}
    return {"requestBody": {"required": True, "content": content}}


def file_body(kind: type[RequestModel], media_types: Iterable[str]) -> JsonObject:
    content = {media_type: {"schema": BINARY} for media_type in media_types}
    return {
        "requestBody": {"required": True, "content": content},
        "parameters": query_parameters(kind),
    }


def request_body(kind: type[Envelope]) -> JsonObject:
    """Describe a request body: JSON, a form of files, or a file with options in the query."""
    body, parameters = json_body(kind), _options(kind)
    content = body["requestBody"]["content"]
    content |= {media: {"schema": BINARY} for media in (NPY, *FILE_ENDINGS)}
    content[FORM] = {"schema": {"$ref": f"{SCHEMAS}{_form_name(kind)}"}}
    return {**body, "parameters": [{**each, "description": IN_QUERY} for each in parameters]}


def _options(kind: type[Envelope]) -> list[JsonObject]:
    return [each for each in query_parameters(kind) if each["name"] != ROWS_FIELDS[kind]]


def _form_name(kind: type[Envelope]) -> str:
    return kind.__name__.replace("Request", "Form")


def _form_schema(kind: type[Envelope]) -> JsonObject:
    fields = {each["name"]: each["schema"] for each in _options(kind)}
    properties = {**fields, ROWS_FIELDS[kind]: FILES}
    return {"title": _form_name(kind), "type": "object", "properties": properties}


def query_parameters(kind: type[RequestModel]) -> list[JsonObject]:
    schemas = {n: query_schema(s) for n, s in kind.model_json_schema()["properties"].items()}
    return [{"name": name, "in": "query", "schema": schema} for name, schema in schemas.items()]


def query_schema(schema: JsonObject) -> JsonObject:
    """Convert a field's schema for a query, without null or a default that clients might send."""
    kind = schema.get("anyOf", [schema])[0]
    if kind["type"] == "object":
        return {"type": "string", "contentMediaType": JSON}
    merged = schema | kind
    return {name: value for name, value in merged.items() if name not in ("anyOf", "default")}


class OpenApiDocument:
    """The OpenAPI document, which is built for the first request."""

    def __init__(self, app: FastAPI, keys: Keys, routes: Sequence[APIRoute]) -> None:
        self._build = app.openapi
        self._keys = keys
        self._routes = routes
        self._contents: dict[str, StaticContent] = {}  # by prefix

    def __call__(self) -> JsonObject:
        return self._document

    @cached_property
    def _document(self) -> JsonObject:
        document = self._build()
        _convert_queries(document)
        _add_schemas(document)
        if self._keys.names:
            _add_keys(document, self._routes, self._keys.api_is_open)
        return document

    def content(self, prefix: str) -> StaticContent:
        """Return the document as JSON, with a prefix for links."""
        if prefix not in self._contents:
            servers = {"servers": [{"url": prefix}]} if prefix else {}
            content = orjson.dumps({**self._document, **servers})
            self._contents[prefix] = StaticContent(content, JSON)
        return self._contents[prefix]


def _convert_queries(document: JsonObject) -> None:
    for operations in document["paths"].values():
        for operation in operations.values():
            for parameter in operation.get("parameters", ()):
                if parameter["in"] == "query":
                    parameter["schema"] = query_schema(parameter["schema"])


def _add_schemas(document: JsonObject) -> None:
    _, generated = models_json_schema(
        [(kind, "validation") for kind in BODIES], ref_template=f"{SCHEMAS}{{model}}"
    )
    schemas = generated["$defs"]
    for schema in schemas.values():
        schema.pop("examples", None)
    forms = {_form_name(kind): _form_schema(kind) for kind in ROWS_FIELDS}
    document["components"]["schemas"] |= schemas | forms


def _add_keys(document: JsonObject, routes: Sequence[APIRoute], api_is_open: bool) -> None:
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
