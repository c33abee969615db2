"""The command `dubito`: its tree of subcommands, and the options of those that call a service.

Other packages add their commands by entry points of the group `dubito.commands`, each a function
that takes the subparsers of `dubito`. What a command does is imported when it runs, so that help
and completion are fast: `dubito.actions` and `dubito.label_actions` have the client's.
"""

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from pkgutil import resolve_name
from typing import TypeAlias
from zipfile import BadZipFile

from dubito.options import URL

GROUP = "dubito.commands"
URL_VARIABLE = "DUBITO_CLIENT_URL"
KEY_VARIABLE = "DUBITO_CLIENT_KEY"
ABOUT = "A prediction service that knows when it doubts."
ENVIRONMENT = (
    f"{URL_VARIABLE} names the service to call if --url does not; {KEY_VARIABLE} holds an API key."
)
FILES = (
    "npy, npz, Parquet, CSV (.csv, .tsv) or zip; or JSON (.json, .jsonl); or images or texts, each "
    "a row; - reads one from standard input"
)

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
Options = Mapping[str, tuple[Callable[[str], object], str]]  # type and meaning

DRAW_OPTIONS: Options = {
    "num_samples": (int, "posterior draws"),
    "seed": (int, "replays the draws of that seed"),
}
PREDICT_OPTIONS: Options = {
    **DRAW_OPTIONS,
    "fpr": (float, "false-positive rate of the flag"),
    "fdr": (float, "in its place: false discovery rate of all flags together"),
    "coverage": (float, "of prediction sets and intervals"),
    "confidence": (float, "with which the coverage is kept"),
    "risk": (float, "largest share of wrong labels among those not abstained from"),
}
ACQUIRE_OPTIONS: Options = {
    **DRAW_OPTIONS,
    "acquisition": (str, "what to choose by: bald, batchbald, ... (default: by the task)"),
    "race": (float, "chance at which a row may be left out, so that others take fewer draws"),
    "beta": (float, "of power_bald: rows are taken by chance, weighted by BALD to this power"),
    "control": (float, "share of the k rows that are set aside at random; needs --keep"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status."""
    options = build_parser().parse_args(arguments)
    try:
        return int(options.run(options) or 0)
    except ModuleNotFoundError as error:  # an extra is not installed
        print(f"dubito: {error}", file=sys.stderr)
        return 1


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("dubito", description=ABOUT, epilog=ENVIRONMENT)
    parser.add_argument("--version", action="version", version=f"dubito-client {_version()}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    add_commands(commands)
    for point in sorted(entry_points(group=GROUP)):
        point.load()(commands)
    return parser


def add_commands(commands: Commands) -> None:
    """Add the commands that call a service, and `completion`."""
    predict = add_call(commands, "predict", "dubito.actions:predict", "predict the rows of a file")
    add_rows(predict)
    _add_answer_options(predict)
    add_options(predict, PREDICT_OPTIONS)
    help = "explain strange rows; of rows that go in requests"
    predict.add_argument("--explain", action="store_true", help=help)
    about = "rank the rows of a file: which labels would teach the model most"
    acquire = add_call(commands, "acquire", "dubito.actions:acquire", about)
    add_rows(acquire)
    add_acquire_options(acquire)
    help = "have the service keep the rows, by their ids"
    acquire.add_argument("--keep", action="store_true", default=None, help=help)
    add_call(commands, "models", "dubito.actions:models", "list the models")
    _add_labels(_add_group(commands, "labels", "push, list, export and delete labels"))
    _add_jobs(_add_group(commands, "jobs", "list jobs, wait for them, cancel and delete them"))
    about = "print a script that has bash, zsh or tcsh complete commands and options"
    completion = commands.add_parser("completion", help=about, description=about)
    completion.add_argument("shell", choices=["bash", "zsh", "tcsh"])
    completion.set_defaults(run=_print_completion)


def add_call(commands: Commands, name: str, function: str, about: str) -> argparse.ArgumentParser:
    """Add a command that calls `function(client, options)`, named as `module:function`."""
    parser = commands.add_parser(name, help=about, description=about)
    parser.set_defaults(run=partial(call_service, function))
    url = os.environ.get(URL_VARIABLE) or URL
    parser.add_argument("--url", default=url, help="of the service (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def add_rows(parser: argparse.ArgumentParser) -> None:
    """Add the files of rows, and the model that they go to."""
    add = parser.add_argument
    add("files", nargs="+", type=Path, metavar="FILE", help=FILES)
    add("--model", metavar="NAME[:VERSION]", help="a published model, and its version or alias")
    help = "have a job do it; `predict` does so with CSV, Parquet, npz and zip"
    add("--job", action="store_true", help=help)
    help = "rows are numbers, as a model of columns encodes these"
    add("--encoded", action="store_true", default=None, help=help)


def add_acquire_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-k", type=int, default=10, help="how many rows (%(default)s)")
    add_options(parser, ACQUIRE_OPTIONS)


def add_options(parser: argparse.ArgumentParser, options: Options) -> None:
    for option, (kind, meaning) in options.items():
        parser.add_argument(f"--{option.replace('_', '-')}", type=kind, help=meaning)


def _add_answer_options(parser: argparse.ArgumentParser) -> None:
    help = "rows to show, at most (%(default)s)"
    parser.add_argument("--rows", type=_count, default=20, help=help)
    help = "write everything, as .csv, .npz or .parquet"
    parser.add_argument("--out", type=Path, metavar="FILE", help=help)


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"expected 0, 1, 2, ..., got {text!r}")
    return int(text)


def _add_group(commands: Commands, name: str, about: str) -> Commands:
    parser = commands.add_parser(name, help=about, description=about)
    return parser.add_subparsers(required=True, metavar="COMMAND")


def _add_labels(commands: Commands) -> None:
    about = "send labels: a CSV file with `id` and `label` (or `target`)"
    push = add_call(commands, "push", "dubito.label_actions:push", about)
    help = "or JSON lines with the same and, of a row that is not kept, its `input`; - reads CSV"
    push.add_argument("file", type=Path, metavar="FILE", help=help)
    help = "labels may take the place of others"
    push.add_argument("--replace", action="store_true", help=help)
    listed = add_call(commands, "list", "dubito.label_actions:show", "show the labels")
    about = "print the labels as CSV"
    exported = add_call(commands, "export", "dubito.label_actions:export", about)
    for parser in (listed, exported):
        parser.add_argument("--annotator", metavar="KEY", help="only of the key of this name")
    about = "delete labels; rows that were acquired wait for one again"
    deleted = add_call(commands, "delete", "dubito.label_actions:delete", about)
    deleted.add_argument("ids", nargs="+", metavar="ID")
    for parser in (push, listed, exported, deleted):
        parser.add_argument("--model", metavar="NAME", help="optional if there is only one")


def _add_jobs(commands: Commands) -> None:
    add_call(commands, "list", "dubito.actions:list_jobs", "list the jobs of this key")
    for name, about in {
        "status": "show how far jobs are",
        "cancel": "cancel jobs",
        "delete": "delete jobs that are over, with their results",
    }.items():
        parser = add_call(commands, name, f"dubito.actions:{name}_jobs", about)
        parser.add_argument("ids", nargs="+", metavar="ID", help="of jobs")
    about = "wait for a job's result, and show it"
    result = add_call(commands, "result", "dubito.actions:show_result", about)
    result.add_argument("id", metavar="ID", help="of a job")
    _add_answer_options(result)


def call_service(function: str, options: argparse.Namespace) -> int:
    """Call a function with a client; return 0, or 1 with a line on standard error."""
    from dubito.client import Client
    from dubito.errors import DubitoError

    try:
        with Client(options.url, key=os.environ.get(KEY_VARIABLE) or None) as client:
            resolve_name(function)(client, options)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader has gone
        return 1
    except (DubitoError, OSError, UnicodeDecodeError, BadZipFile) as error:
        print(f"dubito: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _print_completion(options: argparse.Namespace) -> None:
    import shtab

    print(shtab.complete(build_parser(), options.shell))


def _version() -> str:
    try:
        return version("dubito-client")
    except PackageNotFoundError:  # on the path, but not installed
        return ""
