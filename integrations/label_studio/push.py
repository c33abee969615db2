"""The `dubito label-studio push` command, which creates tasks for the rows to label next."""

import argparse
import base64
import csv
import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import model_store.errors
from dubito.actions import request_options
from dubito.client import Client
from dubito.command import ACQUIRE_OPTIONS
from dubito.errors import DubitoError, InvalidInput
from dubito.files import is_named, is_pool, rows_in
from dubito.results import Model, Ranking
from integrations.label_studio.client import PAGE_TASKS, label_studio_from_environment
from integrations.label_studio.projects import ID, INPUT

FIELD = re.compile(r'value="\$(\w+)"')  # key of a task's data, in a labelling configuration
IMAGES = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpeg", b"RIFF": "webp", b"BM": "bmp"}


class Row(NamedTuple):
    id: str
    content: Any  # for the service
    display: Any  # for annotators


def push(client: Client, options: argparse.Namespace) -> None:
    """Rank a pool, store the selected rows in the service and create a task for each one.

    Raises:
        dubito.DubitoError: for an error of the service, Label Studio or a file.
    """
    try:
        _push(client, options)
    except model_store.errors.DubitoError as error:
        raise DubitoError(str(error)) from None


def _push(client: Client, options: argparse.Namespace) -> None:
    request = request_options(options, ACQUIRE_OPTIONS)
    rows = list(_rows(options.files, _model(client, request.get("model"))))
    studio = label_studio_from_environment(options.studio)
    config = studio.json("GET", f"api/projects/{options.project}/")["label_config"]
    field = FIELD.search(config)
    if field is None:
        expected = 'a labelling configuration with an object that has value="$FIELD"'
        raise InvalidInput(f"project {options.project}", expected, "none")
    pool, ids = [row.content for row in rows], [row.id for row in rows]
    ranking = _ranking(client, pool, options, {**request, "ids": ids, "keep": True})
    existing = {
        str(task["data"][ID])
        for page in studio.tasks(options.project)
        for task in page
        if ID in task["data"]
    }
    # The pool's order does not reveal which rows are control rows.
    new_rows = [rows[n] for n in sorted(ranking.index.tolist()) if rows[n].id not in existing]
    for first in range(0, len(new_rows), PAGE_TASKS):
        part = new_rows[first : first + PAGE_TASKS]
        tasks = [{"data": {**_data(row, field[1]), ID: row.id}} for row in part]
        studio.json("POST", f"api/projects/{options.project}/import", tasks)
    if options.json:
        fields = {"model": ranking.model, "version": ranking.version, "project": options.project}
        print(json.dumps({**fields, "tasks": [row.id for row in new_rows]}))
        return
    skipped = len(ranking) - len(new_rows)
    note = f", {skipped} already had one" if skipped else ""
    print(f"project {options.project}: {len(new_rows)} tasks for {len(rows)} rows{note}")


def _ranking(
    client: Client, pool: Sequence[Any], options: argparse.Namespace, request: dict[str, Any]
) -> Ranking:
    if options.job:
        return client.ranking(client.acquire_job(pool, k=options.k, **request))
    return client.acquire(pool, k=options.k, **request)


def _model(client: Client, name: str | None) -> Model:
    if name is not None:
        return client.model(name)
    models = client.models()
    if len(models) != 1:
        raise InvalidInput("--model", f"one of {[model.name for model in models]}", "none")
    return models[0]


def _rows(files: Sequence[Path], model: Model) -> Iterator[Row]:
    path = files[0]
    kinds = {column["name"]: column["kind"] for column in model.columns or ()}
    if len(files) == 1 and is_named(path, ".csv", ".tsv") and kinds:
        text = path.read_text(encoding="utf-8-sig")
        dialect = csv.excel_tab if is_named(path, ".tsv") else csv.excel
        rows: Sequence[Any] = list(csv.DictReader(io.StringIO(text, newline=""), dialect=dialect))
    elif is_pool(files) and not is_named(path, ".npy"):
        expected = "CSV for a model with columns, JSON, npy, images or texts"
        raise InvalidInput(str(path), expected, "another file")
    else:
        rows = rows_in(files)  # type: ignore[assignment]
    for n, row in enumerate(rows):
        name = f"{path.name} {n}"
        if isinstance(row, Mapping):
            name = str(row["id"]) if row.get("id") not in (None, "") else name
            content = {column: _cell(row.get(column), kind) for column, kind in kinds.items()}
            yield Row(name, content, {**row, **content})
        else:
            yield Row(row.name if isinstance(row, Path) else name, row, row)


def _cell(value: Any, kind: str) -> Any:
    """Convert a CSV cell's text to a JSON value."""
    if value == "":
        return None
    if kind == "numeric" and isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value  # The service reports it with its column.
    return value


def _data(row: Row, field: str) -> dict[str, Any]:
    """Create a task's data. `field` is the key of the text that annotators see."""
    if isinstance(row.display, Mapping):
        text = ", ".join(f"{name}: {value}" for name, value in row.content.items())
        return {field: text, **row.display}
    if isinstance(row.display, np.ndarray):
        return {field: row.id, INPUT: row.display.tolist()}
    if not isinstance(row.display, Path):
        is_text = isinstance(row.display, str)
        return {field: row.display} if is_text else {field: row.id, INPUT: row.display}
    content = row.display.read_bytes()
    for mark, kind in IMAGES.items():
        if content.startswith(mark):
            return {field: f"data:image/{kind};base64,{base64.b64encode(content).decode()}"}
    return {field: content.decode()}
