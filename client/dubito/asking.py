"""The commands that ask a service: predict a file, rank a pool, list the models."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar
from zipfile import BadZipFile

import numpy as np

from dubito import kept, studio
from dubito.calls import Progress
from dubito.client import URL, Client
from dubito.command_names import COMMANDS, KEY_VARIABLE, URL_VARIABLE
from dubito.errors import DubitoError
from dubito.files import check_out, files_given, is_named, is_pool, rows_in, write
from dubito.predictions import OF_ALL_ROWS, Predictions
from dubito.results import Job, Model, Ranking
from dubito.rows import RowsLike
from dubito.studio import TOKEN_VARIABLE
from dubito.studio import URL_VARIABLE as STUDIO_VARIABLE
from dubito.terminal import format_cell, print_table, printable, progress_bar

Result = TypeVar("Result")
Command = Callable[[Client, argparse.Namespace], None]
Options = Mapping[str, tuple[Callable[[str], object], str]]

# Options of requests: type and meaning
OF_BOTH: Options = {
    "num_samples": (int, "posterior draws"),
    "seed": (int, "replays the draws of that seed"),
}
OF_PREDICT: Options = {
    "fpr": (float, "false-positive rate of the flag"),
    "fdr": (float, "in its place: false discovery rate of all flags together"),
    "coverage": (float, "of prediction sets and intervals"),
    "confidence": (float, "with which the coverage is kept"),
    "risk": (float, "largest share of wrong labels among those not abstained from"),
}
OF_ACQUIRE: Options = {
    "acquisition": (str, "what to choose by: bald, batchbald, ... (default: by the task)"),
    "race": (float, "chance at which a row may be left out, so that others take fewer draws"),
    "beta": (float, "of power_bald: rows are taken by chance, weighted by BALD to this power"),
    "control": (float, "share of the k rows that are set aside at random; needs --keep"),
}
FILES = (
    "npy, npz, Parquet, CSV (.csv, .tsv) or zip; or JSON (.json, .jsonl); or images or texts, each "
    "a row; - reads one from standard input"
)
CLASSIFIED = ("label", "probability", "entropy", "bald", "p_value", "flag", "set")
OF_RANKING = (
    *("model", "version", "acquisition", "num_samples", "seed", "pool_size", "excluded"),
    "unknown_categories",
)
REGRESSED = ("mean", "std", "epistemic_std", "low", "high", "p_value", "flag")


def run(arguments: Sequence[str]) -> int:
    """Run a command, and return its exit status: 0, or 1 with a line on standard error that says
    what went wrong."""
    asked = parser().parse_args(arguments)
    try:
        with Client(asked.url, key=os.environ.get(KEY_VARIABLE) or None) as client:
            asked.command(client, asked)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader has gone
        return 1
    except (DubitoError, OSError, UnicodeDecodeError, BadZipFile) as error:
        print(f"dubito: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def parser() -> argparse.ArgumentParser:
    whole = argparse.ArgumentParser("dubito")
    commands = whole.add_subparsers(required=True, metavar="COMMAND")
    of_all = argparse.ArgumentParser(add_help=False)
    url = os.environ.get(URL_VARIABLE) or URL
    of_all.add_argument("--url", default=url, help="of the service (%(default)s)")
    of_all.add_argument("--json", action="store_true", help="print JSON")
    of_rows = argparse.ArgumentParser(add_help=False)
    add = of_rows.add_argument
    add("files", nargs="+", type=Path, metavar="FILE", help=FILES)
    add("--model", metavar="NAME[:VERSION]", help="a published model, and its version or alias")
    help = "have a job do it; `predict` does so with CSV, Parquet, npz and zip"
    add("--job", action="store_true", help=help)
    help = "rows are numbers, as a model of columns encodes these"
    add("--encoded", action="store_true", default=None, help=help)

    def command(name: str, run: Command, *parents: argparse.ArgumentParser) -> Callable[..., Any]:
        added = commands.add_parser(name, parents=[of_all, *parents], description=COMMANDS[name])
        added.set_defaults(command=run)
        return added.add_argument

    of_answers = argparse.ArgumentParser(add_help=False)
    add = of_answers.add_argument
    add("--rows", type=_count, default=20, help="rows to show at most (%(default)s)")
    add("--out", type=Path, metavar="FILE", help="write all there is, as .csv, .npz or .parquet")
    of_predictions = argparse.ArgumentParser(add_help=False)
    _add_options(of_predictions, {**OF_BOTH, **OF_PREDICT})
    add = command("predict", _predict, of_rows, of_answers, of_predictions)
    help = "say what made rows strange, of rows that go in requests"
    add("--explain", action="store_true", help=help)
    of_rankings = argparse.ArgumentParser(add_help=False)
    of_rankings.add_argument("-k", type=int, default=10, help="how many (%(default)s)")
    _add_options(of_rankings, {**OF_BOTH, **OF_ACQUIRE})
    add = command("acquire", _acquire, of_rows, of_rankings)
    help = "have the service keep them, by their ids"
    add("--keep", action="store_true", default=None, help=help)
    command("models", _models)

    def group(name: str) -> Any:
        added = commands.add_parser(name, description=COMMANDS[name])
        return added.add_subparsers(required=True, metavar="COMMAND")

    kept.add_labels(group("labels"), of_all)
    kept.add_jobs(group("jobs"), of_all, of_answers, _show_result)
    help = "make tasks of a project of Label Studio of the rows to label next"
    parents = [of_all, of_rows, of_rankings]
    push = group("studio").add_parser("push", parents=parents, help=help, description=help)
    push.set_defaults(command=_push)
    add = push.add_argument
    add("--project", type=int, required=True, metavar="N", help="the project's number")
    help = f"of Label Studio, by default {STUDIO_VARIABLE}; {TOKEN_VARIABLE} holds a token"
    add("--studio", metavar="URL", help=help)
    return whole


def _add_options(parser: argparse.ArgumentParser, options: Options) -> None:
    for option, (kind, meaning) in options.items():
        parser.add_argument(f"--{option.replace('_', '-')}", type=kind, help=meaning)


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"expected 0, 1, 2, ..., got {text!r}")
    return int(text)


def _options(asked: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    of_all = {name: getattr(asked, name) for name in (*OF_BOTH, *names, "encoded")}
    given = {name: value for name, value in of_all.items() if value is not None}
    if asked.model is not None:
        name, _, version = asked.model.partition(":")
        given |= {"model": name} | ({"version": version} if version else {})
    return given


def _predict(client: Client, asked: argparse.Namespace) -> None:
    options = _options(asked, OF_PREDICT)
    check_out(asked.out)
    not_read: Sequence[str] = ()
    with files_given(asked.files) as files, progress_bar("predicting") as progress:
        path = files[0]
        is_read_there = is_pool(files) and (asked.job or not is_named(path, ".npy"))
        if asked.explain and (asked.job or is_read_there):
            expected = "npy, JSON, images or texts, whose rows go in requests, without --job"
            raise DubitoError(f"--explain: expected {expected}, got what a job reads")
        if asked.job or is_read_there:
            job = client.predict_job(path if is_read_there else rows_in(files), **options)
            answer = by_job(client, job, client.predictions, progress)
            not_read = job.ignored_columns
        else:
            options |= {"explain": True} if asked.explain else {}
            answer = client.predict(rows_in(files), on_progress=progress, **options)
    _show_predictions(client, answer, asked, _names(answer, asked.files), not_read)


def _show_result(client: Client, job: Job, asked: argparse.Namespace) -> None:
    """Wait for a job's result, and show it."""
    with progress_bar("waiting") as progress:
        if job.kind == "acquire":
            _show_ranking(client.ranking(job, on_progress=progress), asked)
            return
        check_out(asked.out)
        answer = client.predictions(job, on_progress=progress)
    _show_predictions(client, answer, asked, _names(answer, ()), job.ignored_columns)


def _show_predictions(
    client: Client,
    answer: Predictions,
    asked: argparse.Namespace,
    names: Sequence[object],
    not_read: Sequence[str],
) -> None:
    if asked.out is not None:
        write(answer, asked.out)
    if asked.json:
        print(json.dumps({**_about(answer), "predictions": list(_objects(answer.table()))}))
        return
    print(f"{answer.model} version {answer.version}, seed {answer.seed}\n")
    shown = min(asked.rows, len(answer))
    heads = ("row", *(CLASSIFIED if answer.is_classification else REGRESSED))
    rows = [(names[n], *row) for n, row in zip(range(shown), _lines(answer), strict=False)]
    print_table(heads, rows)
    more = f"; {len(answer) - shown} more rows (--rows, --out)" if shown < len(answer) else ""
    flagged = int(answer.flag.sum())
    print(f"\n{flagged} of {len(answer)} rows flagged as unlike the data{more}")
    for said in _notes(client, answer, not_read):
        print(said)
    if "explanation.statistic" in answer:
        print("\nwhat made rows strange:")
        for n, why in enumerate(_explanations(client, answer, shown)):
            print(f"  {format_cell(names[n])}: {printable(why)}")


def _notes(client: Client, answer: Predictions, not_read: Sequence[str]) -> Iterator[str]:
    """Yield what one should know of the rows: columns that were passed over, and categories that
    say nothing."""
    if not_read:
        yield f"columns that the model does not take: {', '.join(not_read)}"
    if "unknown_categories" in answer and (counts := answer["unknown_categories"]).any():
        names = [column["name"] for column in client.model(answer.model).columns or ()]
        yield _unknown({name: n for name, n in zip(names, counts.tolist(), strict=False) if n})


def _explanations(client: Client, answer: Predictions, shown: int) -> Iterator[str]:
    """Yield of each row its detectors' largest shares, the columns whose usual value would make it
    most ordinary, and the nearest training rows."""
    head = "explanation.detectors."
    shares = {
        name.removeprefix(head).removesuffix(".share"): array
        for name, array in answer.arrays.items()
        if name.startswith(head) and name.endswith(".share")
    }
    columns = client.model(answer.model).columns or ()
    for n in range(shown):
        by_share = sorted(shares, key=lambda name: -shares[name][n])[:2]
        parts = [", ".join(f"{name} {shares[name][n]:.0%}" for name in by_share)]
        if "explanation.columns" in answer:
            falls = answer["explanation.columns"][n]
            largest = [i for i in np.argsort(-falls)[:3] if falls[i] > 0]
            said = ", ".join(f"{columns[i]['name']} {falls[i]:.3g}" for i in largest)
            parts += [f"columns {said}"] if said else []
        if "explanation.nearest.id" in answer:
            parts.append(f"nearest {', '.join(answer['explanation.nearest.id'][n][:3].tolist())}")
        yield "; ".join(parts)


def _unknown(counts: Mapping[str, int]) -> str:
    found = ", ".join(f"{name} in {n}" for name, n in counts.items())
    return f"rows whose category is missing or unknown to the model: {found}"


def _acquire(client: Client, asked: argparse.Namespace) -> None:
    options = _options(asked, OF_ACQUIRE) | ({"keep": True} if asked.keep else {})
    with files_given(asked.files) as files, progress_bar("ranking") as progress:
        pool: Path | RowsLike = files[0] if is_pool(files) else rows_in(files)
        if not is_pool(files) and len(files) > 1:
            options["ids"] = [path.name for path in files]
        if asked.job:
            job = client.acquire_job(pool, k=asked.k, **options)
            answer = by_job(client, job, client.ranking, progress)
        else:
            answer = client.acquire(pool, k=asked.k, **options)
    _show_ranking(answer, asked)


def _push(client: Client, asked: argparse.Namespace) -> None:
    studio.push(client, asked, _options(asked, OF_ACQUIRE))


def _show_ranking(answer: Ranking, asked: argparse.Namespace) -> None:
    columns = answer.table()
    if asked.json:
        about = {name: getattr(answer, name) for name in OF_RANKING}
        print(json.dumps({**about, "ranking": list(_objects(columns))}))
        return
    print(f"{answer.model} version {answer.version}, by {answer.acquisition}, seed {answer.seed}\n")
    print_table(list(columns), list(zip(*columns.values(), strict=True)))
    left_out = f", {answer.excluded} left out since they are labelled" if answer.excluded else ""
    print(f"\n{len(answer)} of {answer.pool_size} rows{left_out}")
    if answer.unknown_categories:
        print(_unknown(answer.unknown_categories))


def _models(client: Client, asked: argparse.Namespace) -> None:
    models = client.models()
    if asked.json:
        print(json.dumps({"models": [model.raw for model in models]}))
        return
    rows = [
        (m.name, m.serving or "none", len(m.versions), m.task or "", m.method or "", _of(m))
        for m in models
    ]
    print_table(("model", "serving", "versions", "task", "method", "predicts"), rows)
    for model in models:
        for version, why in model.broken.items():
            print(f"{model.name} version {version} cannot be served: {why}")


def by_job(client: Client, job: Job, wait: Callable[..., Result], progress: Progress) -> Result:
    """Wait for a job's result; one who waits no longer wants none, and the job is cancelled."""
    try:
        return wait(job, on_progress=progress)
    except KeyboardInterrupt:
        client.cancel(job)
        raise


def _of(model: Model) -> str:
    if model.classes is not None:
        return f"{len(model.classes)} classes: {', '.join(model.classes)}"
    return model.target or ""


def _names(answer: Predictions, files: Sequence[Path]) -> Sequence[object]:
    if "ids" in answer:
        return answer.ids.tolist()
    return [path.name for path in files] if len(files) == len(answer) > 1 else range(len(answer))


def _lines(answer: Predictions) -> Iterator[tuple[object, ...]]:
    if answer.is_classification:
        columns = (answer.label, answer.probabilities.max(axis=1), answer.entropy, answer.bald)
        sets = map(", ".join, answer.sets())
        yield from zip(*columns, answer.p_value, answer.flag, sets, strict=True)
    else:
        unknown = np.full(len(answer), np.nan)
        epistemic = answer.epistemic_std if "epistemic_std" in answer else unknown
        columns = (answer.mean, answer.std, epistemic, *answer.interval.T)
        yield from zip(*columns, answer.p_value, answer.flag, strict=True)


def _about(answer: Predictions) -> dict[str, Any]:
    return {name: answer[name].tolist() for name in OF_ALL_ROWS if name in answer}


def _objects(columns: dict[str, np.ndarray]) -> Iterator[dict[str, Any]]:
    lists = {name: array.tolist() for name, array in columns.items()}
    for values in zip(*lists.values(), strict=True):
        yield {
            name: None if isinstance(value, float) and not np.isfinite(value) else value
            for name, value in zip(lists, values, strict=True)
        }
