"""`dubito studio push`: rows that are worth a label become tasks of a project of Label Studio."""

import argparse
import base64
import csv
import io
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np

from dubito.client import Client
from dubito.errors import DubitoError, InvalidInput
from dubito.files import is_named, is_pool, rows_in
from dubito.results import Model, Ranking

URL_VARIABLE = "DUBITO_LABEL_STUDIO_URL"
TOKEN_VARIABLE = "DUBITO_LABEL_STUDIO_TOKEN"
TASKS_AT_ONCE = 100
TIMEOUT_S = 60.0
SHOWN = re.compile(r'value="\$(\w+)"')  # of a labelling configuration: a field of a task's data
# Of a task's data, as the service reads them: the row's id, and the row where nothing else says it
ID, INPUT = "dubito_id", "dubito_input"
IMAGES = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpeg", b"RIFF": "webp", b"BM": "bmp"}


class Row(NamedTuple):
    id: str
    content: Any  # as the service takes it
    shown: Any  # as people see it


class LabelStudio:
    """A client of Label Studio's API, with a personal access token, or a legacy one."""

    def __init__(self, url: str, token: str) -> None:
        self._http = httpx.Client(base_url=url.rstrip("/"), timeout=TIMEOUT_S, trust_env=False)
        if token.count(".") == 2:
            answer = self.ask("POST", "/api/token/refresh", {"refresh": token})
            self._http.headers["Authorization"] = f"Bearer {answer['access']}"
        else:
            self._http.headers["Authorization"] = f"Token {token}"

    def ask(self, method: str, path: str, content: Any = None) -> Any:
        try:
            answer = self._http.request(method, path, json=content)
            if answer.is_success:
                return answer.json()
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            raise DubitoError(f"Label Studio: {type(error).__name__}: {error}") from None
        said = f"{answer.status_code}: {answer.text[:300]}"
        raise DubitoError(f"Label Studio: {method} {path} was answered {said}")

    def ids_in(self, project: int) -> set[str]:
        """Return the ids of rows that are tasks of a project."""
        ids: set[str] = set()
        for page in count(1):
            query = f"project={project}&page={page}&page_size={TASKS_AT_ONCE}&fields=all"
            answer = self.ask("GET", f"/api/tasks/?{query}")
            ids |= {str(task["data"][ID]) for task in answer["tasks"] if ID in task["data"]}
            if not answer["tasks"] or page * TASKS_AT_ONCE >= answer["total"]:
                break
        return ids


def push(client: Client, asked: argparse.Namespace, options: dict[str, Any]) -> None:
    """Rank a pool, have the service keep the rows, and make tasks of them."""
    url, token = asked.studio or os.environ.get(URL_VARIABLE), os.environ.get(TOKEN_VARIABLE)
    for name, value in (("--studio", url), (TOKEN_VARIABLE, token)):
        if not value:
            raise InvalidInput(name, "that of Label Studio", "none")
    rows = list(_rows(asked.files, _model(client, options.get("model"))))
    studio = LabelStudio(str(url), str(token))
    config = studio.ask("GET", f"/api/projects/{asked.project}/")["label_config"]
    field = SHOWN.search(config)
    if field is None:
        expected = 'a labelling configuration with an object whose value is "$FIELD"'
        raise InvalidInput(f"project {asked.project}", expected, "none")
    pool, ids = [row.content for row in rows], [row.id for row in rows]
    ranking = _ranking(client, pool, asked, {**options, "ids": ids, "keep": True})
    there = studio.ids_in(asked.project)
    # in the pool's order, which does not tell control rows from others
    chosen = [rows[n] for n in sorted(ranking.index.tolist()) if rows[n].id not in there]
    for first in range(0, len(chosen), TASKS_AT_ONCE):
        tasks = [
            {"data": {**_data(row, field[1]), ID: row.id}}
            for row in chosen[first : first + TASKS_AT_ONCE]
        ]
        studio.ask("POST", f"/api/projects/{asked.project}/import", tasks)
    if asked.json:
        about = {"model": ranking.model, "version": ranking.version, "project": asked.project}
        print(json.dumps({**about, "tasks": [row.id for row in chosen]}))
        return
    known = len(ranking) - len(chosen)
    said = f", {known} were tasks already" if known else ""
    print(f"project {asked.project}: {len(chosen)} tasks of {len(rows)} rows{said}")


def _ranking(
    client: Client, pool: Sequence[Any], asked: argparse.Namespace, options: dict[str, Any]
) -> Ranking:
    if asked.job:
        return client.ranking(client.acquire_job(pool, k=asked.k, **options))
    return client.acquire(pool, k=asked.k, **options)


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
        listed: Sequence[Any] = list(csv.DictReader(io.StringIO(text, newline=""), dialect=dialect))
    elif is_pool(files) and not is_named(path, ".npy"):
        expected = "CSV of a model of columns, JSON, npy, images or texts"
        raise InvalidInput(str(path), expected, "another file")
    else:
        listed = rows_in(files)  # type: ignore[assignment]
    for n, row in enumerate(listed):
        name = f"{path.name} {n}"
        if isinstance(row, Mapping):
            name = str(row["id"]) if row.get("id") not in (None, "") else name
            content = {column: _cell(row.get(column), kind) for column, kind in kinds.items()}
            yield Row(name, content, {**row, **content})
        else:
            yield Row(row.name if isinstance(row, Path) else name, row, row)


def _cell(value: Any, kind: str) -> Any:
    """Return a cell of CSV as JSON has it; others as they are."""
    if value == "":
        return None
    if kind == "numeric" and isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value  # the service names it
    return value


def _data(row: Row, field: str) -> dict[str, Any]:
    """Return a task's data: what people see in `field`, and the row."""
    if isinstance(row.shown, Mapping):
        said = ", ".join(f"{name}: {value}" for name, value in row.content.items())
        return {field: said, **row.shown}
    if isinstance(row.shown, np.ndarray):
        return {field: row.id, INPUT: row.shown.tolist()}
    if not isinstance(row.shown, Path):
        is_text = isinstance(row.shown, str)
        return {field: row.shown} if is_text else {field: row.id, INPUT: row.shown}
    content = row.shown.read_bytes()
    for mark, kind in IMAGES.items():
        if content.startswith(mark):
            return {field: f"data:image/{kind};base64,{base64.b64encode(content).decode()}"}
    return {field: content.decode()}
