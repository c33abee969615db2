"""The parts of the OpenAPI document that routes share: problems, and the bodies and queries that
requests may have."""

from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from service.api.media_types import JSON, PROBLEM_JSON
from service.api.requests import FILE_ENDINGS, FORM, NPY, PURPOSE, TEST
from service.api.schemas import (
    AcquireRequest,
    Envelope,
    LabelsDeletion,
    LabelsRequest,
    PredictJobRequest,
    PredictRequest,
    Problem,
    RequestModel,
)
from service.auth.keys import Keys

# The others follow from the routes' `responses`
NAMED = (PredictRequest, AcquireRequest, PredictJobRequest, LabelsRequest, LabelsDeletion, Problem)
FORMS: dict[type[RequestModel], str] = {
    PredictRequest: "inputs",
    AcquireRequest: "pool",
    PredictJobRequest: "inputs",
}
SCHEMAS = "#/components/schemas/"
BINARY = {"type": "string", "format": "binary"}
IN_QUERY = "with a body that is no JSON"
PROBLEM: dict[str, Any] = {"content": {PROBLEM_JSON: {"schema": {"$ref": f"{SCHEMAS}Problem"}}}}
ERRORS = (404, 413, 415, 422, 429, 503, 504)  # of requests that bring rows
Answers = dict[int | str, dict[str, Any]]
OF_ALL: Answers = {"default": {"description": "Any other error", **PROBLEM}}
PURPOSE_PARAMETER: dict[str, Any] = {
    "name": PURPOSE,
    "in": "header",
    "schema": {"type": "string", "enum": [TEST]},
    "description": "with `test` the rows count neither for drift nor for metrics of rows and flags",
}


def answers(
    kind: type[BaseModel] | None,
    *errors: int,
    status: int = 200,
    content: dict[str, Any] | None = None,
) -> Answers:
    """Describe the answers of a route: what it gives, of other media types in `content`, and the
    statuses of its problems."""
    given: dict[str, Any] = {} if kind is None else {"model": kind}
    given |= {} if content is None else {"content": content}
    return {status: given, **dict.fromkeys(errors, PROBLEM)}


def with_schemas(document: dict[str, Any]) -> dict[str, Any]:
    """Return a document that has the schemas of requests and problems, which the framework does not
    see."""
    found = models_json_schema(
        [(kind, "validation") for kind in NAMED], ref_template=f"{SCHEMAS}{{model}}"
    )
    schemas = found[1]["$defs"]
    for schema in schemas.values():
        schema.pop("examples", None)
    for kind, rows_field in FORMS.items():
        schema = schemas[kind.__name__]
        files = {
            "type": "array",
            "items": BINARY,
            "minItems": 1,
            "description": "PNG, JPEG, WebP or BMP files, for a model of images",
        }
        fields = {name: _without_default(field) for name, field in schema["properties"].items()}
        form = {**schema, "title": _form_name(kind), "properties": {**fields, rows_field: files}}
        schemas[_form_name(kind)] = form
    components = document["components"]
    return {
        **document,
        "components": {**components, "schemas": {**components["schemas"], **schemas}},
    }


def with_keys(document: dict[str, Any], keys: Keys) -> dict[str, Any]:
    """Return a document that says which routes need a key, if any do."""
    if not keys.names:
        return document
    document["components"]["securitySchemes"] = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "key": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
    }
    for path, operations in document["paths"].items():
        needed = keys.scope_of(path)
        for operation in operations.values() if needed is not None else ():
            operation["security"] = [{"bearer": [needed]}, {"key": [needed]}]
            operation["responses"] |= {
                "401": {"description": "No valid key", **PROBLEM},
                "403": {"description": f"The key is without the scope {needed}", **PROBLEM},
            }
    return document


def _form_name(kind: type[RequestModel]) -> str:
    return kind.__name__.replace("Request", "Form")


def json_body(kind: type[RequestModel]) -> dict[str, Any]:
    examples = kind.model_json_schema()["examples"]
    named = {f"example {i}": {"value": value} for i, value in enumerate(examples, start=1)}
    schema = {"$ref": f"{SCHEMAS}{kind.__name__}"}
    content = {JSON: {"schema": schema, "examples": named}}
    return {"requestBody": {"required": True, "content": content}}


def file_body(kind: type[RequestModel], media_types: Iterable[str]) -> dict[str, Any]:
    content = {media_type: {"schema": BINARY} for media_type in media_types}
    return {"requestBody": {"required": True, "content": content}, "parameters": query_of(kind)}


def request_body(kind: type[Envelope]) -> dict[str, Any]:
    """Describe a request: JSON with examples, a form, or a file of rows with the rest in the
    query."""
    body = json_body(kind)
    content = body["requestBody"]["content"]
    content |= {media: {"schema": BINARY} for media in (NPY, *FILE_ENDINGS)}
    content[FORM] = {"schema": {"$ref": f"{SCHEMAS}{_form_name(kind)}"}}
    parameters = query_of(kind, but=FORMS[kind])
    return {**body, "parameters": [{**each, "description": IN_QUERY} for each in parameters]}


def query_of(kind: type[RequestModel], but: str = "") -> list[dict[str, Any]]:
    return [
        {"name": name, "in": "query", "schema": _as_written(schema)}
        for name, schema in kind.model_json_schema()["properties"].items()
        if name != but
    ]


def _as_written(schema: dict[str, Any]) -> dict[str, Any]:
    """Describe a parameter of a query, which is left out rather than null; objects are JSON."""
    kind = schema.get("anyOf", [schema])[0]
    if kind["type"] == "object":
        return {"type": "string", "contentMediaType": JSON}
    return _without_default({k: v for k, v in schema.items() if k != "anyOf"} | kind)


def _without_default(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a field's schema so that clients do not send its default: not of a query, where JSON
    holds every field, nor of a form, where they write it in their own way."""
    return {name: value for name, value in schema.items() if name != "default"}
