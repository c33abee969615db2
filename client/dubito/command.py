"""Argument parser for the `dubito` command.

Other packages add commands with entry points in the group `dubito.commands`. Each entry point is a
function that takes the subparsers of `dubito`. Commands are imported when they run, so that help
and completion are fast.
"""

import argparse
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.metadata import entry_points, requires
from pathlib import Path
from pkgutil import resolve_name
from typing import TypeAlias
from zipfile import BadZipFile

from dubito.options import URL

GROUP = "dubito.commands"
URL_VARIABLE = "DUBITO_CLIENT_URL"
KEY_VARIABLE = "DUBITO_CLIENT_KEY"
SUMMARY = "A prediction service that knows when it doubts."
ENVIRONMENT = (
    f"Set {URL_VARIABLE} to the service's URL, unless you use --url, and {KEY_VARIABLE} to an API "
    "key."
)
FILES = (
    "npy, npz, Parquet, CSV (.csv, .tsv), zip or JSON (.json, .jsonl) file; images or texts, one "
    "per row; - reads standard input"
)

DISTRIBUTIONS = {"PIL": "pillow", "sklearn": "scikit-learn"}  # by module, if the names differ

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
Options = Mapping[str, tuple[Callable[[str], object], str]]  # type and help text

DRAW_OPTIONS: Options = {
    "num_samples": (int, "posterior draws"),
    "seed": (int, "seed of the draws"),
}
PREDICT_OPTIONS: Options = {
    **DRAW_OPTIONS,
    "missing": (str, "reject: refuse missing values in columns that were complete in training"),
    "fpr": (float, "false-positive rate of the flag"),
    "fdr": (float, "false discovery rate of all flags together, instead of --fpr"),
    "coverage": (float, "coverage of prediction sets and intervals"),
    "confidence": (float, "probability that the calibration keeps coverage and fpr"),
    "risk": (float, "maximum share of wrong labels among answered rows"),
}
ACQUIRE_OPTIONS: Options = {
    **DRAW_OPTIONS,
    "acquisition": (str, "ranking score: bald, batchbald, ... (default depends on the task)"),
    "race": (float, "drop hopeless rows early, with this probability of dropping a top row"),
    "beta": (float, "exponent of BALD in the sampling weights of power_bald"),
    "control": (float, "share of the k rows that are selected at random; requires --keep"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status."""
    options = build_parser().parse_args(arguments)
    try:
        return int(options.run(options) or 0)
    except ModuleNotFoundError as error:
        extra = _find_extra(error.name or "")
        hint = f"this command needs the extra `{extra}`: pip install 'dubito[{extra}]'"
        print(f"dubito: {hint if extra else error}", file=sys.stderr)
        return 1


def _find_extra(module: str) -> str | None:
    """Find the optional dependency group that installs a module."""
    name = DISTRIBUTIONS.get(module, module).replace("_", "-")
    for requirement in requires("dubito") or ():
        if match := re.fullmatch(rf"{name}\b(?!-).*extra == ['\"](\w+)['\"]", requirement):
            return match[1]
    return None


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("dubito", description=SUMMARY, epilog=ENVIRONMENT)
    help = "print the version"
    parser.add_argument("--version", action=_PrintVersion, nargs=0, help=help)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    add_commands(commands)
    for point in sorted(entry_points(group=GROUP)):
        point.load()(commands)
    return parser


def add_commands(commands: Commands) -> None:
    predict = add_call(commands, "predict", "dubito.actions:predict", "predict the rows of a file")
    add_rows(predict)
    _add_answer_options(predict)
    add_options(predict, PREDICT_OPTIONS)
    help = "explain unusual rows; not available for jobs"
    predict.add_argument("--explain", action="store_true", help=help)
    summary = "rank the rows of a file by how useful their labels would be"
    acquire = add_call(commands, "acquire", "dubito.actions:acquire", summary)
    add_rows(acquire)
    add_acquire_options(acquire)
    help = "store the selected rows on the service"
    acquire.add_argument("--keep", action="store_true", default=None, help=help)
    add_call(commands, "models", "dubito.actions:models", "list the models")
    _add_labels(_add_group(commands, "labels", "push, list, export and delete labels"))
    _add_jobs(_add_group(commands, "jobs", "list jobs, wait for them, cancel and delete them"))
    summary = "print a shell completion script"
    completion = commands.add_parser("completion", help=summary, description=summary)
    completion.add_argument("shell", choices=["bash", "zsh", "tcsh"])
    completion.set_defaults(run=_print_completion)


def add_call(commands: Commands, name: str, function: str, summary: str) -> argparse.ArgumentParser:
    """Add a command that calls `function(client, options)`, written as `module:function`."""
    parser = commands.add_parser(name, help=summary, description=summary)
    parser.set_defaults(run=partial(call_service, function))
    url = os.environ.get(URL_VARIABLE) or URL
    parser.add_argument("--url", default=url, help="URL of the service (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def add_rows(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("files", nargs="+", type=Path, metavar="FILE", help=FILES)
    add("--model", metavar="NAME[:VERSION]", help="model, with an optional version or alias")
    add("--version", metavar="VERSION", help="version or alias, instead of NAME:VERSION")
    help = "run as a job; `predict` always does so for CSV, Parquet, npz and zip"
    add("--job", action="store_true", help=help)


def add_acquire_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-k", type=int, default=10, help="number of rows (%(default)s)")
    add_options(parser, ACQUIRE_OPTIONS)


def add_options(parser: argparse.ArgumentParser, options: Options) -> None:
    for option, (kind, meaning) in options.items():
        parser.add_argument(f"--{option.replace('_', '-')}", type=kind, help=meaning)


def _add_answer_options(parser: argparse.ArgumentParser) -> None:
    help = "maximum number of rows to show (%(default)s)"
    parser.add_argument("--rows", type=_count, default=20, help=help)
    help = "write the results to a .csv, .npz or .parquet file"
    parser.add_argument("--out", type=Path, metavar="FILE", help=help)


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"expected 0, 1, 2, ..., got {text!r}")
    return int(text)


def _add_group(commands: Commands, name: str, summary: str) -> Commands:
    parser = commands.add_parser(name, help=summary, description=summary)
    return parser.add_subparsers(required=True, metavar="COMMAND")


def _add_labels(commands: Commands) -> None:
    summary = "send labels from a CSV file with the columns `id` and `label` (or `target`)"
    push = add_call(commands, "push", "dubito.actions:push_labels", summary)
    help = "CSV file, or JSON lines that may also have `input`; - reads CSV from standard input"
    push.add_argument("file", type=Path, metavar="FILE", help=help)
    help = "replace existing labels"
    push.add_argument("--replace", action="store_true", help=help)
    listed = add_call(commands, "list", "dubito.actions:show_labels", "show the labels")
    summary = "print the labels as CSV"
    exported = add_call(commands, "export", "dubito.actions:export_labels", summary)
    for parser in (listed, exported):
        parser.add_argument("--annotator", metavar="KEY", help="only labels from this key")
        help = "replaced and deleted labels instead"
        parser.add_argument("--former", action="store_true", help=help)
    summary = "delete labels; acquired rows wait for a label again"
    deleted = add_call(commands, "delete", "dubito.actions:delete_labels", summary)
    deleted.add_argument("ids", nargs="+", metavar="ID")
    for parser in (push, listed, exported, deleted):
        parser.add_argument("--model", metavar="NAME", help="optional if there is only one")


def _add_jobs(commands: Commands) -> None:
    for name, method, summary in (
        ("list", None, "list the jobs of this key"),
        ("status", "job", "show the progress of jobs"),
        ("cancel", "cancel", "cancel jobs"),
        ("delete", "delete", "delete finished jobs and their results"),
    ):
        parser = add_call(commands, name, "dubito.actions:show_jobs", summary)
        parser.set_defaults(method=method)
        if method is not None:
            parser.add_argument("ids", nargs="+", metavar="ID", help="job ids")
    summary = "wait for a job and show its result"
    result = add_call(commands, "result", "dubito.actions:show_result", summary)
    result.add_argument("id", metavar="ID", help="job id")
    _add_answer_options(result)


def call_service(function: str, options: argparse.Namespace) -> int:
    """Call `function(client, options)`, print any error and return the exit status."""
    from dubito.client import Client
    from dubito.errors import DubitoError

    try:
        with _terminable(), Client(options.url, key=os.environ.get(KEY_VARIABLE) or None) as client:
            resolve_name(function)(client, options)
    except BrokenPipeError:
        # Prevent a second error when Python flushes standard output at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (DubitoError, OSError, UnicodeDecodeError, BadZipFile) as error:
        message = str(error)
        if isinstance(error, OSError) and error.filename is not None:
            message = f"{error.filename}: {error.strerror}"
        print(f"dubito: {message}", file=sys.stderr)
        return 1
    except _Terminated:
        return 128 + signal.SIGTERM
    except KeyboardInterrupt:
        return 130
    return 0


class _Terminated(KeyboardInterrupt):
    """Raised when the process receives SIGTERM."""


@contextmanager
def _terminable() -> Iterator[None]:
    """Handle SIGTERM like Ctrl-C so that the current job is cancelled."""

    def terminate(*_: object) -> None:
        raise _Terminated

    previous = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _print_completion(options: argparse.Namespace) -> None:
    import shtab

    print(shtab.complete(build_parser(), options.shell))


class _PrintVersion(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print("dubito", resolve_name("model_store.version:VERSION"))
        parser.exit()
