"""Parts of the OpenAPI document that routes declare. `document.py` builds the document."""

from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel

from service.api.media_types import JSON, PROBLEM_JSON
from service.api.requests import FILE_ENDINGS, FORM, NPY, PURPOSE, TEST
from service.api.schemas import (
    AcquireRequest,
    Envelope,
    PredictJobRequest,
    PredictRequest,
    RequestModel,
)

FORMS: dict[type[RequestModel], str] = {
    PredictRequest: "inputs",
    AcquireRequest: "pool",
    PredictJobRequest: "inputs",
}
SCHEMAS = "#/components/schemas/"
BINARY = {"type": "string", "format": "binary"}
IN_QUERY = "only if the body is not JSON"
PROBLEM: dict[str, Any] = {"content": {PROBLEM_JSON: {"schema": {"$ref": f"{SCHEMAS}Problem"}}}}
Answers = dict[int | str, dict[str, Any]]
ERRORS = (404, 413, 415, 422, 429, 503, 504)  # of requests with rows
DEFAULT_ERRORS: Answers = {"default": {"description": "Any other error", **PROBLEM}}
PURPOSE_PARAMETER: dict[str, Any] = {
    "name": PURPOSE,
    "in": "header",
    "schema": {"type": "string", "enum": [TEST]},
    "description": "`test` excludes the rows from drift detection and metrics",
}


def errors(*statuses: int) -> Answers:
    """Describe the error responses of a route."""
    return dict.fromkeys(statuses, PROBLEM)


ROW_ERRORS = errors(*ERRORS)


def answers(
    kind: type[BaseModel] | None,
    *statuses: int,
    status: int = 200,
    content: dict[str, Any] | None = None,
) -> Answers:
    """Describe the responses of a route: a JSON model, other media types, or both."""
    described: dict[str, Any] = {} if kind is None else {"model": kind}
    described |= {} if content is None else {"content": content}
    return {status: described, **errors(*statuses)}


def form_name(kind: type[RequestModel]) -> str:
    return kind.__name__.replace("Request", "Form")


def json_body(kind: type[RequestModel]) -> dict[str, Any]:
    examples = kind.model_json_schema()["examples"]
    named = {f"example {i}": {"value": value} for i, value in enumerate(examples, start=1)}
    schema = {"$ref": f"{SCHEMAS}{kind.__name__}"}
    content = {JSON: {"schema": schema, "examples": named}}
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
    """Convert a field's schema to the schema of a query parameter, which cannot be null."""
    kind = schema.get("anyOf", [schema])[0]
    if kind["type"] == "object":
        return {"type": "string", "contentMediaType": JSON}
    return without_default({k: v for k, v in schema.items() if k != "anyOf"} | kind)


def without_default(schema: dict[str, Any]) -> dict[str, Any]:
    """Remove the default from a schema, because some clients would send it."""
    return {name: value for name, value in schema.items() if name != "default"}
