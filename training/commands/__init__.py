"""Options for the commands in `python -m training` and `dubito`.

A command's module is imported only when the command runs, so that help and completion are fast.
"""

import argparse
import ctypes
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from model_store.commands import Commands
from model_store.commands import add_command as _add_command
from model_store.errors import DubitoError, InvalidInput, NotFound
from model_store.processes import TOKENIZING, processors
from training import log

ROOT = Path(__file__).parents[2]  # of the checkout or of the installed packages
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # from glibc's malloc.h
CACHED_BYTES = 1 << 30
DONE = 0
FAILED = 1
WRONG_INPUT = 2
INTERRUPTED = 130
VERSION: dict[str, Any] = {
    "metavar": "NAME[:VERSION]",
    "help": "VERSION is a number or an alias (default: latest)",
}
SHARED_OPTIONS: dict[str, dict[str, Any]] = {
    "--anyway": {"action": "store_true", "help": "publish even if it is worse than a guess"},
    "--as": {"dest": "name", "metavar": "NEWNAME", "help": "publish under this name instead"},
    "--device": {"default": "auto", "choices": ["auto", "cpu", "cuda"]},
    "--json": {"action": "store_true", "help": "print the result as JSON"},
    "--quiet": {"action": "store_true", "help": "no progress bar"},
    "--target": {"metavar": "COLUMN", "help": "target column of csv: and parquet: data"},
}


def add_commands(commands: Commands) -> None:
    """Add the training commands and, in a source checkout, the experiment commands."""
    _add_inspect(commands)
    _add_fit(commands)
    _add_evaluate(commands)
    _add_compare(commands)
    _add_calibrate(commands)
    _add_prune(commands)
    _add_candidate(commands)
    if (ROOT / "experiments" / "command.py").exists():
        if str(ROOT) not in sys.path:
            sys.path.append(str(ROOT))
        resolve_name("experiments.command:add_commands")(commands)


def run(function: str, options: argparse.Namespace) -> int:
    """Run a command and return its exit code."""
    configure_process()
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # for a recipe's own modules
    try:
        with print_messages():
            resolve_name(function)(options)
        return DONE
    except (InvalidInput, NotFound) as error:
        print(f"error: {error}", file=sys.stderr)
        return WRONG_INPUT
    except (DubitoError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        message = "stopped; to resume from the last checkpoint, run the same command again"
        print(f"\n{message}", file=sys.stderr)
        return INTERRUPTED


add_command = partial(_add_command, run=run)


def configure_process() -> None:
    """Configure threads and memory for training. Call this before importing torch.

    Torch's threads synchronise about fifty times per step. Long spinning takes CPU time from
    threads that wait for a core. A spin count of 4,000 lasts microseconds and still avoids most
    wake-ups.

    By default, glibc returns blocks of more than 32 MB, such as activations of convolutions, to the
    system, and mapping them again is slow. Other C libraries have no `mallopt`.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
        os.environ.setdefault("GOMP_SPINCOUNT", "4000")
    os.environ.setdefault("OMP_NUM_THREADS", str(processors()))
    os.environ |= TOKENIZING
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, CACHED_BYTES)
        mallopt(M_TRIM_THRESHOLD, CACHED_BYTES)


@contextmanager
def print_messages() -> Iterator[None]:
    """Print training log messages to standard error without a prefix."""
    handler, level = logging.StreamHandler(sys.stderr), log.level
    handler.setFormatter(logging.Formatter("%(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


def add_options(parser: argparse.ArgumentParser, *names: str) -> None:
    """Add the options shared by several commands."""
    for name in names:
        parser.add_argument(name, **SHARED_OPTIONS[name])


def _add_fit(commands: Commands) -> None:
    about = "fit a recipe on its data and publish the model"
    parser = add_command(commands, "fit", "training.commands.fit:fit", about)
    add = parser.add_argument
    recipe_help = (
        "a TOML file, such as the included recipes/digits.toml; by default made for --data"
    )
    add("recipe", type=Path, nargs="?", help=recipe_help)
    add("--data", metavar="SRC", help="instead of the recipe's source: digits, csv:FILE, ...")
    _add_data(parser)
    out_help = "file of a new recipe (default: NAME.toml)"
    add("--recipe-out", type=Path, metavar="FILE", help=out_help)
    class_help = "fit without this class; can be repeated"
    add("--leave-out", metavar="CLASS", action="append", help=class_help)
    add("--name", help="publish under this name instead of the recipe's")
    add("--seed", type=int, help="instead of the recipe's seed")
    add("--warm-start", metavar="NAME[:VERSION]", help="start from a published version's weights")
    add("--again", action="store_true", help="fit even if a version has this recipe and data")
    add_options(parser, "--anyway", "--device", "--quiet", "--json")


def _add_inspect(commands: Commands) -> None:
    about = "show the task, columns and warnings of a data source"
    parser = add_command(commands, "inspect", "training.commands.fit:inspect", about)
    source_help = "csv:FILE, parquet:FILE, npz:FILE, images:FOLDER"
    parser.add_argument("--data", metavar="SRC", required=True, help=source_help)
    _add_data(parser)
    add_options(parser, "--json")


def _add_data(parser: argparse.ArgumentParser) -> None:
    add_options(parser, "--target")
    add = parser.add_argument
    tasks = ["classification", "regression"]
    add("--task", choices=tasks, help="default: inferred from the target")
    add("--group", metavar="COLUMN", help="keep the rows of each group in one split")
    add("--time", metavar="COLUMN", help="calibrate and test on the latest rows")
    text_help = "text of missing cells; can be repeated"
    add("--missing-value", metavar="TEXT", action="append", help=text_help)
    add("--date-format", metavar="FORMAT", help="format of dates, such as %%d/%%m/%%Y")
    add("--decimal", metavar="MARK", help="decimal mark in CSV, a point or a comma")
    add("--thousands", metavar="MARK", help="thousands separator in CSV")
    kind_help = "kind of a column: numeric, categorical, time or ignored; can be repeated"
    add("--column", metavar="NAME=KIND", action="append", help=kind_help)
    add("--ignore", metavar="COLUMN", action="append", help="leave out a column; can be repeated")


def _add_prune(commands: Commands) -> None:
    about = "prune the least certain weights of a Bayes by Backprop model, and publish it"
    parser = add_command(commands, "prune", "training.commands.versions:prune", about)
    add = parser.add_argument
    add("model", **VERSION)
    add("--fraction", type=float, required=True, help="share of weights to remove, such as .75")
    add("--data", metavar="SRC", help="new location of the fit's data, if it has moved")
    add_options(parser, "--as", "--anyway")


def _add_calibrate(commands: Commands) -> None:
    about = "calibrate a model on other data, and publish it"
    parser = add_command(commands, "calibrate", "training.commands.versions:calibrate", about)
    add = parser.add_argument
    add("model", **VERSION)
    source_help = "rows that the model was not fitted on, with labels or targets"
    add("--data", metavar="SRC", required=True, help=source_help)
    add_options(parser, "--target", "--as")
    rows_help = "default: the version's number, up to a third of the rows"
    for split in ("reference", "ranking"):
        add(f"--{split}-rows", type=int, metavar="N", help=rows_help)
    add("--seed", type=int, default=0, help="seed of the splits and draws")
    add("--quiet", action="store_true", help="no progress messages")


def _add_evaluate(commands: Commands) -> None:
    about = "evaluate a published version, and store the report with it"
    parser = add_command(commands, "evaluate", "training.commands.versions:evaluate", about)
    add = parser.add_argument
    add("model", **VERSION)
    add(
        "--outliers",
        metavar="NAME=SRC",
        action="append",
        default=[],
        help="rows unlike the data: images:PATH, npz:FILE, or csv:FILE for tables and "
        "text; can be repeated",
    )
    _add_test_rows(parser)
    add_options(parser, "--quiet", "--json")


def _add_compare(commands: Commands) -> None:
    about = "compare two published versions on the same test rows"
    parser = add_command(commands, "compare", "training.commands.versions:compare", about)
    parser.add_argument("first", **VERSION)
    parser.add_argument("second", metavar="NAME[:VERSION]", help="the version to compare with it")
    _add_test_rows(parser)
    add_options(parser, "--json")


def _add_test_rows(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--data", metavar="SRC", help="instead of the test rows of the (first) version's fit")
    add("--draws", type=int, help="draws per row (default: the version's number)")
    add("--rows", type=int, default=1000, help="maximum number of rows per set")
    add("--seed", type=int, default=0, help="seed of rows and draws")


def _add_candidate(commands: Commands) -> None:
    about = "fit a candidate on labels from the service, and compare it with `latest`"
    parser = add_command(commands, "candidate", "training.commands.versions:candidate", about)
    add = parser.add_argument
    add("model", metavar="NAME", help="the model whose `latest` the candidate starts from")
    state_help = "the service's state folder (default: DUBITO_STATE or `state`)"
    add("--state", type=Path, metavar="DIR", help=state_help)
    add("--data", metavar="SRC", help="new location of the version's data, if it has moved")
    add("--min-labels", type=int, default=1, metavar="N", help="minimum number of new labels")
    promote_help = "serve the candidate if it is no worse and every label was sent with a key"
    add("--promote", action=argparse.BooleanOptionalAction, default=False, help=promote_help)
    add("--watch", action="store_true", help="poll for new labels until interrupted")
    add("--interval-s", type=float, default=60.0, metavar="S", help="seconds between polls")
    add_options(parser, "--device")
