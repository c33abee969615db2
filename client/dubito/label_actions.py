"""Command-line actions for labels."""

import argparse
import csv
import io
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from dubito.client import Client
from dubito.errors import InvalidInput
from dubito.files import JSON_LINES, escape_formula, is_named, rows_in, unescape_formula
from dubito.results import KeptLabel
from dubito.terminal import print_table

MAX_LABELS = 1000  # per request


def push(client: Client, options: argparse.Namespace) -> None:
    entries = list(_entries(options.file))
    counts = {"accepted": 0, "known": 0, "replaced": 0}
    model, total = options.model, 0
    for first in range(0, len(entries), MAX_LABELS):
        part = entries[first : first + MAX_LABELS]
        labels = {entry["id"]: entry["value"] for entry in part}
        inputs = {entry["id"]: entry["input"] for entry in part if "input" in entry}
        answer = client.add_labels(labels, model=model, inputs=inputs, replace=options.replace)
        counts = {name: count + getattr(answer, name) for name, count in counts.items()}
        model, total = answer.model, answer.labels
    if options.json:
        print(json.dumps({"model": model, **counts, "labels": total}))
    else:
        new, known, replaced = counts.values()
        print(f"{model}: {new} new labels, {known} known, {replaced} replaced; {total} in total")


def _entries(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the `id`, `value` and optional `input` of each labelled line."""
    ids = set()
    for n, line in enumerate(_lines(path), start=1):
        values = {
            name: line[name] for name in ("label", "target") if line.get(name) not in ("", None)
        }
        if not values:
            continue
        name = line.get("id")
        if name in (None, "") or len(values) > 1:
            expected = "an `id`, and a `label` or a `target`"
            raise InvalidInput(f"{path}: line {n}", expected, ", ".join(line))
        if name in ids:
            raise InvalidInput(f"{path}: line {n}", "a unique id", repr(name))
        ids.add(name)
        value = _number(path, n, values["target"]) if "target" in values else str(values["label"])
        row = {"input": line["input"]} if line.get("input") is not None else {}
        yield {"id": str(name), "value": value, **row}
    if not ids:
        raise InvalidInput(str(path), "lines with an `id` and a `label` or a `target`", "none")


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    if is_named(path, *JSON_LINES):
        yield from rows_in([path])
        return
    text = sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8-sig")
    for line in csv.DictReader(io.StringIO(text, newline="")):
        yield {
            name: unescape_formula(cell) if isinstance(cell, str) else cell
            for name, cell in line.items()
        }


def _number(path: Path, n: int, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise InvalidInput(f"{path}: line {n}: target", "a number", repr(value)) from None


def show(client: Client, options: argparse.Namespace) -> None:
    columns, labels = _list(client, options)
    if options.json:
        print(json.dumps({"labels": labels}))
        return
    if labels:
        print_table(columns, [[label[name] for name in columns] for label in labels])
        print()
    print(f"{len(labels)} labels")


def export(client: Client, options: argparse.Namespace) -> None:
    columns, labels = _list(client, options)
    if options.json:
        for label in labels:
            print(json.dumps(label))
        return
    writer = csv.DictWriter(sys.stdout, columns, extrasaction="ignore")
    writer.writeheader()
    for label in labels:
        writer.writerow({name: escape_formula(cell) for name, cell in label.items()})


def _list(client: Client, options: argparse.Namespace) -> tuple[list[str], list[dict[str, Any]]]:
    """Return the non-empty columns and the labels."""
    kept = client.kept_labels(options.model, annotator=options.annotator, former=options.former)
    labels = [asdict(label) for label in kept]
    columns = [field.name for field in fields(KeptLabel)]
    if labels:
        columns = [name for name in columns if any(label[name] is not None for label in labels)]
    return columns, labels


def delete(client: Client, options: argparse.Namespace) -> None:
    answer = client.delete_labels(options.ids, model=options.model)
    if options.json:
        print(json.dumps(asdict(answer)))
    else:
        print(
            f"{answer.model}: {answer.deleted} of {len(options.ids)} deleted, {answer.labels} left"
        )
