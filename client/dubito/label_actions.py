"""What the commands `dubito labels` do."""

import argparse
import csv
import io
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dubito.client import Client
from dubito.errors import DubitoError, InvalidInput
from dubito.results import KeptLabel
from dubito.terminal import print_table

LABELS_AT_ONCE = 1000  # that are kept all or none


def push(client: Client, asked: argparse.Namespace) -> None:
    entries = list(_entries(asked.file))
    kept = {"accepted": 0, "known": 0, "replaced": 0}
    model, labels = asked.model, 0
    for first in range(0, len(entries), LABELS_AT_ONCE):
        part = entries[first : first + LABELS_AT_ONCE]
        values = {entry["id"]: entry["value"] for entry in part}
        inputs = {entry["id"]: entry["input"] for entry in part if "input" in entry}
        answer = client.add_labels(values, model=model, inputs=inputs, replace=asked.replace)
        kept = {name: count + getattr(answer, name) for name, count in kept.items()}
        model, labels = answer.model, answer.labels
    if asked.json:
        print(json.dumps({"model": model, **kept, "labels": labels}))
    else:
        new, known, replaced = kept.values()
        print(f"{model}: {new} new labels, {known} known, {replaced} replaced; {labels} in all")


def _entries(path: Path) -> Iterator[dict[str, Any]]:
    """Yield of each line of a file that has a label the row's id, its `value`, and its `input`
    where there is one."""
    seen = set()
    for n, line in enumerate(_lines(path), start=1):
        given = {
            name: line[name] for name in ("label", "target") if line.get(name) not in ("", None)
        }
        if not given:  # it waits for one
            continue
        name = line.get("id")
        if name in (None, "") or len(given) > 1:
            expected = "an `id`, and a `label` or a `target`"
            raise InvalidInput(f"{path}: line {n}", expected, "others")
        if name in seen:
            raise InvalidInput(f"{path}: line {n}", "an id that is there once", repr(name))
        seen.add(name)
        value = _number(path, n, given["target"]) if "target" in given else str(given["label"])
        row = {"input": line["input"]} if line.get("input") is not None else {}
        yield {"id": str(name), "value": value, **row}
    if not seen:
        raise InvalidInput(str(path), "lines with an `id` and a `label` or a `target`", "none")


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    text = sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8-sig")
    if path.suffix.lower() not in (".jsonl", ".ndjson"):
        yield from csv.DictReader(io.StringIO(text, newline=""))
        return
    try:
        yield from (json.loads(line) for line in text.split("\n") if line.strip())
    except ValueError as error:
        raise DubitoError(f"{path}: expected JSON on each line, got another: {error}") from None


def _number(path: Path, n: int, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise InvalidInput(f"{path}: line {n}: target", "a number", repr(value)) from None


def show(client: Client, asked: argparse.Namespace) -> None:
    found = client.kept_labels(asked.model, annotator=asked.annotator)
    if asked.json:
        print(json.dumps({"labels": [asdict(label) for label in found]}))
        return
    if found:
        rows = [_row_of(label) for label in found]
        print_table(list(rows[0]), [list(row.values()) for row in rows])
        print()
    print(f"{len(found)} labels")


def export(client: Client, asked: argparse.Namespace) -> None:
    found = client.kept_labels(asked.model, annotator=asked.annotator)
    if asked.json:
        for label in found:
            print(json.dumps(asdict(label)))
        return
    value = "target" if found and found[0].label is None else "label"
    writer = csv.DictWriter(sys.stdout, ["id", value, "annotator", "time", "control"])
    writer.writeheader()
    writer.writerows(map(_row_of, found))


def _row_of(label: KeptLabel) -> dict[str, Any]:
    value = {"target": label.target} if label.label is None else {"label": label.label}
    of_key = {"annotator": label.annotator or "", "time": label.time}
    return {"id": label.id, **value, **of_key, "control": label.control}


def delete(client: Client, asked: argparse.Namespace) -> None:
    answer = client.delete_labels(asked.ids, model=asked.model)
    if asked.json:
        print(json.dumps(asdict(answer)))
    else:
        print(f"{answer.model}: {answer.deleted} of {len(asked.ids)} deleted, {answer.labels} left")
