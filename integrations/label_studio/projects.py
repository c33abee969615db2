"""Convert Label Studio tasks to rows, and predictions to choices or numbers.

A labelling configuration is XML with `Choices` for classification and `Number` for regression.
Their `toName` is the displayed object. Its `value="$field"` is the field of the task's data that
contains the row.
"""

import base64
import binascii
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from model_store.artifacts.manifest import ClassSpec, Manifest
from model_store.errors import InvalidInput, describe_value

MAX_CONFIG_CHARACTERS = 100_000
INPUT = "dubito_input"  # the row in a task's data, as in `inputs` of /predict
ID = "dubito_id"  # the row's id in a task's data
Fetch = Callable[[str], bytes]


@dataclass(frozen=True)
class LabelConfig:
    """The control for the model's predictions, and the object being labelled."""

    control: str
    object_name: str
    kind: str  # choices or number
    field: str  # key of a task's data
    choices: tuple[str, ...]


def parse_config(text: Any, manifest: Manifest) -> LabelConfig:
    if (
        not isinstance(text, str)
        or len(text) > MAX_CONFIG_CHARACTERS
        or "<!" in text.replace("<!--", "")
    ):
        expected = f"XML of up to {MAX_CONFIG_CHARACTERS} characters without a document type"
        raise InvalidInput("label_config", expected, "another value")
    try:
        root = ElementTree.fromstring(text)
    except ElementTree.ParseError:
        raise InvalidInput("label_config", "XML", "another value") from None
    tag = "Choices" if isinstance(manifest.output, ClassSpec) else "Number"
    control = next((element for element in root.iter(tag) if element.get("toName")), None)
    if control is None:
        expected = f"<{tag} name=... toName=...>, for a model of {manifest.task}"
        raise InvalidInput("label_config", expected, "none")
    object_name = str(control.get("toName"))
    displayed = next(
        (
            e
            for e in root.iter()
            if e.get("name") == object_name and str(e.get("value")).startswith("$")
        ),
        None,
    )
    if displayed is None:
        expected = 'an object with the name in toName and value="$FIELD"'
        raise InvalidInput("label_config", expected, "none")
    choices = tuple(str(e.get("alias") or e.get("value")) for e in control.iter("Choice"))
    missing = [name for name in manifest.classes or () if name not in choices]
    if missing:
        expected = "a <Choice> for each of the model's classes"
        raise InvalidInput("label_config", expected, f"none for {missing[:20]}")
    field = str(displayed.get("value"))[1:]
    return LabelConfig(str(control.get("name")), object_name, tag.lower(), field, choices)


def read_row(manifest: Manifest, config: LabelConfig, data: Any, field: str, fetch: Fetch) -> Any:
    """Convert a task to a row in the format of the `/predict` inputs.

    `fetch` reads images that are not data URIs, and raises InvalidInput for URLs that it refuses.
    """
    if not isinstance(data, dict):
        raise InvalidInput(field, "an object", describe_value(data))
    if INPUT in data:
        return data[INPUT]
    spec, value = manifest.input, data.get(config.field)
    if spec.columns:
        row = value if isinstance(value, dict) else data
        missing = [column.name for column in spec.columns if column.name not in row]
        if missing:
            raise InvalidInput(field, "all of the model's columns", f"none named {missing[:20]}")
        return {column.name: row[column.name] for column in spec.columns}
    if value is None:
        expected = f"the field {config.field[:80]!r} of the labelling configuration, or `{INPUT}`"
        raise InvalidInput(field, expected, "neither")
    if spec.image is not None and isinstance(value, str):
        return base64.b64encode(image_bytes(value, field, fetch)).decode()
    return value


def image_bytes(url: str, field: str, fetch: Fetch) -> bytes:
    """Return an image's content, given its data URI or URL."""
    if not url.startswith("data:"):
        return fetch(url)
    head, comma, content = url.partition(",")
    if not comma or not head.startswith("data:image/") or not head.endswith(";base64"):
        raise InvalidInput(field, "data:image/...;base64,...", "another data URI")
    try:
        return base64.b64decode(content, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidInput(field, "base64", "invalid characters or padding") from None


def make_result(config: LabelConfig, value: str | float) -> list[dict[str, Any]]:
    content = {"choices": [value]} if config.kind == "choices" else {"number": value}
    names = {"from_name": config.control, "to_name": config.object_name}
    return [{**names, "type": config.kind, "value": content}]


def read_annotation(config: LabelConfig, annotation: Any) -> str | float | None:
    """Return an annotation's label or target, or None if it is empty or was skipped."""
    if not isinstance(annotation, dict) or annotation.get("was_cancelled"):
        return None
    result = annotation.get("result")
    regions = [r for r in result if isinstance(r, dict)] if isinstance(result, list) else []
    for region in regions:
        content = region.get("value")
        if region.get("from_name") != config.control or not isinstance(content, dict):
            continue
        if config.kind == "number":
            number = content.get("number")
            if isinstance(number, bool) or not isinstance(number, int | float):
                raise InvalidInput("annotation.result", "a number", "another value")
            return float(number)
        choices = content.get("choices")
        if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], str):
            raise InvalidInput("annotation.result", "one choice", "several or none")
        return choices[0]
    return None


def label_id(project: Any, task: Any) -> str:
    """Return a task's row id.

    If the row was not acquired, the id consists of the project and task numbers.
    """
    task = task if isinstance(task, dict) else {}
    data = task.get("data")
    acquired = data.get(ID) if isinstance(data, dict) else None
    if isinstance(acquired, str):
        return acquired
    number = task.get("id")
    project_id = project.get("id") if isinstance(project, dict) else None
    project_id = task.get("project") if project_id is None else project_id
    if not isinstance(number, int) or not isinstance(project_id, int):
        raise InvalidInput("task.id", "the numbers of a task and its project", "another value")
    return f"label-studio-{project_id}-{number}"
