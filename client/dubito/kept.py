"""The commands about what a service keeps: labels, and jobs."""

import argparse
import csv
import io
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeAlias

from dubito.client import Client
from dubito.errors import DubitoError, InvalidInput
from dubito.results import Job, KeptLabel
from dubito.terminal import print_table

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

LABELS_AT_ONCE = 1000  # that are kept all or none
OF_JOBS = ("id", "kind", "state", "done", "model", "version", "rows", "created")


def add_labels(commands: Commands, of_all: argparse.ArgumentParser) -> None:
    def add(name: str, run: Callable[..., None], help: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, parents=[of_all], help=help, description=help)
        added.set_defaults(command=run)
        added.add_argument("--model", metavar="NAME", help="may be left out where there is one")
        return added

    push = add("push", _push, "send labels: a CSV file with `id` and `label` (or `target`)")
    help = "or JSON lines with the same and, of a row that is not kept, its `input`; - reads CSV"
    push.add_argument("file", type=Path, metavar="FILE", help=help)
    help = "labels may take the place of others"
    push.add_argument("--replace", action="store_true", help=help)
    listed = add("list", _list, "show the labels that are kept")
    exported = add("export", _export, "print the labels that are kept as CSV")
    for parser in (listed, exported):
        help = "of the key of this name alone"
        parser.add_argument("--annotator", metavar="KEY", help=help)
    help = "delete labels; rows that were acquired wait for one again"
    add("delete", _delete_labels, help).add_argument("ids", nargs="+", metavar="ID")


def _push(client: Client, asked: argparse.Namespace) -> None:
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


def _list(client: Client, asked: argparse.Namespace) -> None:
    found = client.kept_labels(asked.model, annotator=asked.annotator)
    if asked.json:
        print(json.dumps({"labels": [asdict(label) for label in found]}))
        return
    if found:
        rows = [_row_of(label) for label in found]
        print_table(list(rows[0]), [list(row.values()) for row in rows])
        print()
    print(f"{len(found)} labels")


def _export(client: Client, asked: argparse.Namespace) -> None:
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


def _delete_labels(client: Client, asked: argparse.Namespace) -> None:
    answer = client.delete_labels(asked.ids, model=asked.model)
    if asked.json:
        print(json.dumps(asdict(answer)))
    else:
        print(f"{answer.model}: {answer.deleted} of {len(asked.ids)} deleted, {answer.labels} left")


def add_jobs(
    commands: Commands,
    of_all: argparse.ArgumentParser,
    of_results: argparse.ArgumentParser,
    show_result: Callable[[Client, Job, argparse.Namespace], None],
) -> None:
    """Add the commands about jobs.

    Args:
        of_results: its options, as of `predict`.
        show_result: waits for the result of a job, and prints it.
    """
    helps = {
        "list": "list the jobs that this key asked for",
        "status": "say how far jobs are",
        "cancel": "have jobs end",
        "delete": "delete jobs that are over, with their results",
        "result": "wait for a job's result, and show it",
    }
    parsers = {}
    for name, does in helps.items():
        parents = [of_all, of_results] if name == "result" else [of_all]
        parsers[name] = commands.add_parser(name, parents=parents, help=does, description=does)
        if name == "result":
            parsers[name].add_argument("id", metavar="ID", help="of a job")
        elif name != "list":
            parsers[name].add_argument("ids", nargs="+", metavar="ID", help="of jobs")
    parsers["list"].set_defaults(command=lambda client, asked: _show(client.jobs(), asked))
    for name in ("status", "cancel", "delete"):
        parsers[name].set_defaults(command=_each(name))
    parsers["result"].set_defaults(
        command=lambda client, asked: show_result(client, client.job(asked.id), asked)
    )


def _each(name: str) -> Callable[[Client, argparse.Namespace], None]:
    def run(client: Client, asked: argparse.Namespace) -> None:
        call = {"status": client.job, "cancel": client.cancel, "delete": client.delete}[name]
        _show([call(job) for job in asked.ids], asked)

    return run


def _show(jobs: Sequence[Job], asked: argparse.Namespace) -> None:
    if asked.json:
        print(json.dumps({"jobs": [job.raw for job in jobs]}))
        return
    cells = [
        (j.id, j.kind, j.state, f"{j.progress:.0%}", j.model, j.version, j.rows, j.created)
        for j in jobs
    ]
    print_table(OF_JOBS, cells)
    for job in jobs:
        if job.error:
            print(f"{job.id}: {job.error}")
