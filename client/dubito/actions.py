"""Command-line actions, which call the service and print the answers."""

import argparse
import contextlib
import csv
import io
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from dubito.client import Client
from dubito.command import ACQUIRE_OPTIONS, PREDICT_OPTIONS
from dubito.endpoints import Progress
from dubito.errors import DubitoError, InvalidInput
from dubito.files import (
    JSON_LINES,
    check_out,
    escape_formula,
    is_named,
    is_pool,
    open_files,
    rows_in,
    unescape_formula,
    write,
)
from dubito.predictions import GLOBAL_FIELDS, Predictions
from dubito.results import Job, KeptLabel, Model, Ranking
from dubito.rows import RowsLike

MAX_CELL_CHARACTERS = 40
MAX_LABELS = 1000  # per request
Result = TypeVar("Result")
RANKING_FIELDS = (
    *("model", "version", "acquisition", "num_samples", "seed", "pool_size", "excluded"),
    "unknown_categories",
)
JOB_COLUMNS = ("id", "kind", "state", "done", "model", "version", "rows", "created")


def request_options(options: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    """Collect the request options from the command line. Unset options are None."""
    name, _, version = (options.model or "").partition(":")
    if version and options.version:
        raise DubitoError("--version: expected no version in --model, got two versions")
    request = {option: getattr(options, option) for option in names}
    return request | {"model": name or None, "version": version or options.version}


def predict(client: Client, options: argparse.Namespace) -> None:
    request = request_options(options, PREDICT_OPTIONS)
    check_out(options.out)
    ignored_columns: Sequence[str] = ()
    with open_files(options.files) as files, progress_bar("predicting") as progress:
        path = files[0]
        is_read_by_job = is_pool(files) and (options.job or not is_named(path, ".npy"))
        if options.explain and (options.job or is_read_by_job):
            expected = "an npy or JSON file, images or texts, without --job"
            raise DubitoError(f"--explain: expected {expected}, got input for a job")
        if options.job or is_read_by_job:
            job = client.predict_job(path if is_read_by_job else rows_in(files), **request)
            answer = wait_or_cancel(client, job, client.predictions, progress)
            ignored_columns = job.ignored_columns
        else:
            request["explain"] = options.explain or None
            answer = client.predict(rows_in(files), on_progress=progress, **request)
    show_predictions(answer, options, ignored_columns, options.files)


def show_result(client: Client, options: argparse.Namespace) -> None:
    """Wait for a job and print its result."""
    job = client.job(options.id)
    with progress_bar("waiting") as progress:
        if job.kind == "acquire":
            _show_ranking(client.ranking(job, on_progress=progress), options)
            return
        check_out(options.out)
        answer = client.predictions(job, on_progress=progress)
    show_predictions(answer, options, job.ignored_columns)


def show_predictions(
    answer: Predictions,
    options: argparse.Namespace,
    ignored_columns: Sequence[str],
    files: Sequence[Path] = (),
) -> None:
    if options.out is not None:
        write(answer, options.out)
    unknown = _count_unknown(answer)
    if options.json:
        fields = {name: answer[name].tolist() for name in GLOBAL_FIELDS if name in answer}
        fields |= {"unknown_categories": unknown} if "unknown_categories" in fields else {}
        print(json.dumps({**fields, "predictions": list(_objects(answer.table()))}))
        return
    print(f"{answer.model} version {answer.version}, seed {answer.seed}\n")
    names, shown = _row_names(answer, files), min(options.rows, len(answer))
    columns = {"row": names, **_main_columns(answer)}
    print_table(list(columns), [*zip(*columns.values(), strict=True)][:shown])
    more = f"; {len(answer) - shown} more rows (--rows, --out)" if shown < len(answer) else ""
    flagged = int(answer.flag.sum())
    print(f"\n{flagged} of {len(answer)} rows flagged as unusual{more}")
    if ignored_columns:
        print(f"ignored columns: {', '.join(ignored_columns)}")
    if unknown:
        print(_unknown_categories(unknown))
    ungrouped = int((answer.category == "").sum()) if "category" in answer else 0
    if ungrouped:
        print(
            f"rows without a known group: {ungrouped}; the least favourable group applies to them"
        )
    if "missing" in answer and answer.missing.any():
        print("\nflagged because of missing values:")
        for name, missing in zip(names[:shown], answer.missing_columns(), strict=False):
            if missing:
                print(f"  {format_cell(name)}: {printable(', '.join(missing))}")
    if "explanation.statistic" in answer:
        print("\nexplanations:")
        for n in range(shown):
            print(f"  {format_cell(names[n])}: {printable(_explain(answer, n))}")


def _main_columns(answer: Predictions) -> dict[str, Iterable[object]]:
    columns: dict[str, Iterable[object]]
    if answer.is_classification:
        columns = {"label": answer.label, "probability": answer.probabilities.max(axis=1)}
        columns |= {name: answer[name] for name in ("entropy", "bald", "p_value", "flag")}
        return columns | {"set": map(", ".join, answer.sets())}
    unknown = np.full(len(answer), np.nan)
    epistemic = answer.epistemic_std if "epistemic_std" in answer else unknown
    low, high = answer.interval.T
    columns = {"mean": answer.mean, "std": answer.std, "epistemic_std": epistemic}
    return columns | {"low": low, "high": high, "p_value": answer.p_value, "flag": answer.flag}


def _count_unknown(answer: Predictions) -> dict[str, int]:
    if "unknown_categories" not in answer:
        return {}
    counts = zip(answer["columns"].tolist(), answer["unknown_categories"].tolist(), strict=True)
    return {name: count for name, count in counts if count}


def _explain(answer: Predictions, n: int) -> str:
    head, tail = "explanation.detectors.", ".share"
    shares = {
        name.removeprefix(head).removesuffix(tail): array[n]
        for name, array in answer.arrays.items()
        if name.startswith(head) and name.endswith(tail)
    }
    by_share = sorted(shares.items(), key=lambda item: -item[1])[:2]
    parts = [", ".join(f"{name} {share:.0%}" for name, share in by_share)]
    if "explanation.columns" in answer:
        falls = answer["explanation.columns"][n]
        largest = [i for i in np.argsort(-falls)[:3] if falls[i] > 0]
        names = ", ".join(f"{answer['columns'][i]} {falls[i]:.3g}" for i in largest)
        parts += [f"columns {names}"] if names else []
    if "explanation.nearest.id" in answer:
        parts.append(f"nearest {', '.join(answer['explanation.nearest.id'][n][:3].tolist())}")
    return "; ".join(parts)


def _unknown_categories(counts: Mapping[str, int]) -> str:
    columns = ", ".join(f"{name} in {n}" for name, n in counts.items())
    return f"rows with missing or unknown categories: {columns}"


def acquire(client: Client, options: argparse.Namespace) -> None:
    request = request_options(options, ACQUIRE_OPTIONS) | {"keep": options.keep}
    with open_files(options.files) as files, progress_bar("ranking") as progress:
        pool: Path | RowsLike = files[0] if is_pool(files) else rows_in(files)
        if not is_pool(files) and len(files) > 1:
            request["ids"] = _file_names(files)
        if options.job:
            job = client.acquire_job(pool, k=options.k, **request)
            answer = wait_or_cancel(client, job, client.ranking, progress)
        else:
            answer = client.acquire(pool, k=options.k, **request)
    _show_ranking(answer, options)


def _show_ranking(answer: Ranking, options: argparse.Namespace) -> None:
    columns = answer.table()
    if options.json:
        fields = {name: getattr(answer, name) for name in RANKING_FIELDS}
        print(json.dumps({**fields, "ranking": list(_objects(columns))}))
        return
    print(f"{answer.model} version {answer.version}, by {answer.acquisition}, seed {answer.seed}\n")
    print_table(list(columns), list(zip(*columns.values(), strict=True)))
    excluded = f", {answer.excluded} labelled rows excluded" if answer.excluded else ""
    print(f"\n{len(answer)} of {answer.pool_size} rows{excluded}")
    if answer.unknown_categories:
        print(_unknown_categories(answer.unknown_categories))


def models(client: Client, options: argparse.Namespace) -> None:
    models = client.models()
    if options.json:
        print(json.dumps({"models": [model.raw for model in models]}))
        return
    rows = [
        (m.name, m.serving or "none", len(m.versions), m.task or "", m.method or "", _targets(m))
        for m in models
    ]
    print_table(("model", "serving", "versions", "task", "method", "predicts"), rows)
    for model in models:
        for version, reason in model.broken.items():
            print(f"{model.name} version {version} cannot be served: {reason}")


def wait_or_cancel(
    client: Client, job: Job, wait: Callable[..., Result], progress: Progress
) -> Result:
    """Wait for a job's result. Cancel the job on `KeyboardInterrupt`."""
    try:
        return wait(job, on_progress=progress)
    except KeyboardInterrupt:
        client.cancel(job)
        raise


def _targets(model: Model) -> str:
    if model.classes is not None:
        return f"{len(model.classes)} classes: {', '.join(model.classes)}"
    return model.target or ""


def _row_names(answer: Predictions, files: Sequence[Path]) -> Sequence[object]:
    if "ids" in answer:
        return answer.ids.tolist()
    return _file_names(files) if len(files) == len(answer) > 1 else range(len(answer))


def _file_names(files: Sequence[Path]) -> list[str]:
    """Return the file names, or the paths if several files share a name."""
    names = [path.name for path in files]
    return names if len({*names}) == len(names) else [path.as_posix() for path in files]


def _objects(columns: dict[str, np.ndarray]) -> Iterator[dict[str, Any]]:
    lists = {name: array.tolist() for name, array in columns.items()}
    for values in zip(*lists.values(), strict=True):
        yield {
            name: None if isinstance(value, float) and not np.isfinite(value) else value
            for name, value in zip(lists, values, strict=True)
        }


def show_jobs(client: Client, options: argparse.Namespace) -> None:
    """List all jobs, or show, cancel or delete some of them."""
    call = None if options.method is None else getattr(client, options.method)
    jobs: Sequence[Job] = client.jobs() if call is None else list(map(call, options.ids))
    if options.json:
        print(json.dumps({"jobs": [job.raw for job in jobs]}))
        return
    cells = [
        (j.id, j.kind, j.state, f"{j.progress:.0%}", j.model, j.version, j.rows, j.created)
        for j in jobs
    ]
    print_table(JOB_COLUMNS, cells)
    for job in jobs:
        if job.error:
            print(f"{job.id}: {job.error}")


def push_labels(client: Client, options: argparse.Namespace) -> None:
    entries = list(_label_entries(options.file))
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


def _label_entries(path: Path) -> Iterator[dict[str, Any]]:
    ids = set()
    for n, line in enumerate(_label_lines(path), start=1):
        names = [name for name in ("label", "target") if line.get(name) not in ("", None)]
        values = {name: line[name] for name in names}
        if not values:
            continue
        name = line.get("id")
        if name in (None, "") or len(values) > 1:
            expected = "an `id`, and a `label` or a `target`"
            raise InvalidInput(f"{path}: line {n}", expected, ", ".join(line))
        if name in ids:
            raise InvalidInput(f"{path}: line {n}", "a unique id", repr(name))
        ids.add(name)
        value = _target(path, n, values["target"]) if "target" in values else str(values["label"])
        row = {"input": line["input"]} if line.get("input") is not None else {}
        yield {"id": str(name), "value": value, **row}
    if not ids:
        raise InvalidInput(str(path), "lines with an `id` and a `label` or a `target`", "none")


def _label_lines(path: Path) -> Iterator[dict[str, Any]]:
    if is_named(path, *JSON_LINES):
        yield from rows_in([path])
        return
    text = sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8-sig")
    for line in csv.DictReader(io.StringIO(text, newline="")):
        yield {
            name: unescape_formula(cell) if isinstance(cell, str) else cell
            for name, cell in line.items()
        }


def _target(path: Path, n: int, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise InvalidInput(f"{path}: line {n}: target", "a number", repr(value)) from None


def show_labels(client: Client, options: argparse.Namespace) -> None:
    columns, labels = _list_labels(client, options)
    if options.json:
        print(json.dumps({"labels": labels}))
        return
    if labels:
        print_table(columns, [[label[name] for name in columns] for label in labels])
        print()
    print(f"{len(labels)} labels")


def export_labels(client: Client, options: argparse.Namespace) -> None:
    columns, labels = _list_labels(client, options)
    if options.json:
        for label in labels:
            print(json.dumps(label))
        return
    writer = csv.DictWriter(sys.stdout, columns, extrasaction="ignore")
    writer.writeheader()
    for label in labels:
        writer.writerow({name: escape_formula(cell) for name, cell in label.items()})


def _list_labels(
    client: Client, options: argparse.Namespace
) -> tuple[list[str], list[dict[str, Any]]]:
    kept = client.kept_labels(options.model, annotator=options.annotator, former=options.former)
    labels = [asdict(label) for label in kept]
    columns = [field.name for field in fields(KeptLabel)]
    if labels:
        columns = [name for name in columns if any(label[name] is not None for label in labels)]
    return columns, labels


def delete_labels(client: Client, options: argparse.Namespace) -> None:
    answer = client.delete_labels(options.ids, model=options.model)
    if options.json:
        print(json.dumps(asdict(answer)))
    else:
        deleted = f"{answer.deleted} of {len(options.ids)} deleted"
        print(f"{answer.model}: {deleted}, {answer.labels} left")


def format_cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool | np.bool_):
        return "yes" if value else ""
    if isinstance(value, float | np.floating):
        return "" if math.isnan(value) else f"{value:.4g}"
    text = printable(str(value))
    return text if len(text) <= MAX_CELL_CHARACTERS else text[: MAX_CELL_CHARACTERS - 3] + "..."


def printable(text: str) -> str:
    """Replace control characters, because they could alter the terminal."""
    return "".join(character if character.isprintable() else "?" for character in text)


def print_table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table with right-aligned numbers."""
    cells = [[format_cell(value) for value in row] for row in rows]
    is_number = [
        all(isinstance(row[i], int | float | np.number) for row in rows) for i in range(len(heads))
    ]
    widths = [max(map(len, column)) for column in zip(heads, *cells, strict=True)]
    for line in (heads, ["-" * width for width in widths], *cells):
        columns = zip(line, widths, is_number, strict=True)
        padded = [v.rjust(width) if right else v.ljust(width) for v, width, right in columns]
        print("  ".join(padded).rstrip())


@contextlib.contextmanager
def progress_bar(title: str) -> Iterator[Callable[[float], object]]:
    """Show a progress bar on a terminal if rich is installed. Yield a function that sets it."""
    if not (sys.stderr.isatty() and find_spec("rich")):
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(title, total=1.0)
        yield lambda share: progress.update(task, completed=share)
