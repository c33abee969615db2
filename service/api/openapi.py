"""The parts of the OpenAPI document that routes share: problems, and the bodies that requests may
have."""

from typing import Any

from service.api.requests import FILE_ENDINGS, FORM, NPY, PURPOSE, TEST
from service.api.schemas import Envelope, ModelRequest, Problem, RequestModel
from service.error_forms import JSON, PROBLEM_JSON


def problem_content() -> dict[str, Any]:
    return {"model": Problem, "content": {PROBLEM_JSON: {}}}


ERRORS: dict[int | str, dict[str, Any]] = {
    status: problem_content() for status in (404, 413, 415, 422, 429, 503, 504)
}
PURPOSE_PARAMETER: dict[str, Any] = {
    "name": PURPOSE,
    "in": "header",
    "schema": {"type": "string", "enum": [TEST]},
    "description": "with `test` the rows count neither for drift nor for metrics of rows and flags",
}


def file_body(kind: type[ModelRequest], media_types: list[str]) -> dict[str, Any]:
    binary = {"type": "string", "format": "binary"}
    content = {media_type: {"schema": binary} for media_type in media_types}
    return {"requestBody": {"required": True, "content": content}, "parameters": query_of(kind)}


def query_of(kind: type[RequestModel]) -> list[dict[str, Any]]:
    return [
        {"name": name, "in": "query", **_as_written(schema)}
        for name, schema in kind.model_json_schema()["properties"].items()
    ]


def _as_written(schema: dict[str, Any]) -> dict[str, Any]:
    """Describe a parameter of a query; lists are JSON there too."""
    is_list = schema.get("type") == "array"
    return {"content": {JSON: {"schema": schema}}} if is_list else {"schema": schema}


def request_body(
    kind: type[Envelope], rows_field: str, takes_files: bool = False
) -> dict[str, Any]:
    """Describe a request: JSON with examples, an npy array with the rest in the query, or a form;
    files of pools with the rest in the query where it takes them.
    """
    schema = kind.model_json_schema()
    examples = {
        f"example {i}": {"value": value} for i, value in enumerate(schema.pop("examples"), start=1)
    }
    binary = {"type": "string", "format": "binary"}
    files = {
        "type": "array",
        "items": binary,
        "minItems": 1,
        "description": "PNG, JPEG, WebP or BMP files, for a model of images",
    }
    form = {**schema, "properties": {**schema["properties"], rows_field: files}}
    content = {
        JSON: {"schema": schema, "examples": examples},
        NPY: {"schema": binary},
        FORM: {"schema": form},
    }
    if takes_files:
        content |= {media_type: {"schema": binary} for media_type in FILE_ENDINGS}
    return {"requestBody": {"required": True, "content": content}}
