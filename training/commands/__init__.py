"""Options for the commands in `python -m training` and `dubito`.

A command's module is imported only when the command runs, so that help and completion are fast.
"""

import argparse
import atexit
import ctypes
import gc
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
GC_THRESHOLD = 50_000  # with Python's 700, collections take a tenth of a short fit
VERSION: dict[str, Any] = {
    "metavar": "NAME[:VERSION]",
    "help": "VERSION is a number or an alias (default: latest)",
}
REPEATED = {"action": "append"}
KINDS = "kind of a column: numeric, categorical, time or ignored"
SHARED_OPTIONS: dict[str, dict[str, Any]] = {
    "--anyway": {"action": "store_true", "help": "publish even if it is worse than a guess"},
    "--as": {"dest": "name", "metavar": "NEWNAME", "help": "publish under this name instead"},
    "--device": {"default": "auto", "choices": ["auto", "cpu", "cuda"]},
    "--json": {"action": "store_true", "help": "print the result as JSON"},
    "--quiet": {"action": "store_true", "help": "no progress bar"},
    "--target": {"metavar": "COLUMN", "help": "target column of csv: and parquet: data"},
    "--task": {"choices": ["classification", "regression"], "help": "default: from the target"},
    "--group": {"metavar": "COLUMN", "help": "keep the rows of each group in one split"},
    "--time": {"metavar": "COLUMN", "help": "calibrate and test on the latest rows"},
    "--weight": {"metavar": "COLUMN", "help": "weights of the training rows"},
    "--test-fraction": {"type": float, "metavar": "SHARE", "help": "share of test rows (0.2)"},
    "--missing-value": {**REPEATED, "metavar": "TEXT", "help": "text of missing cells; repeatable"},
    "--date-format": {"metavar": "FORMAT", "help": "format of dates, such as %%d/%%m/%%Y"},
    "--decimal": {"metavar": "MARK", "help": "decimal mark in CSV, a point or a comma"},
    "--thousands": {"metavar": "MARK", "help": "thousands separator in CSV"},
    "--column": {**REPEATED, "metavar": "NAME=KIND", "help": f"{KINDS}; repeatable"},
    "--ignore": {**REPEATED, "metavar": "COLUMN", "help": "column to leave out; repeatable"},
    "--draws": {"type": int, "help": "draws per row (default: the version's number)"},
    "--rows": {"type": int, "default": 1000, "help": "maximum number of rows per set"},
    "--seed": {"type": int, "default": 0, "help": "seed of rows and draws"},
    "--data": {"metavar": "SRC", "help": "instead of the test rows of the (first) version's fit"},
}
DATA_OPTIONS = (
    *("--target", "--task", "--group", "--time", "--weight", "--test-fraction"),
    *("--missing-value", "--date-format", "--decimal", "--thousands", "--column", "--ignore"),
)
TEST_OPTIONS = ("--data", "--draws", "--rows", "--seed")


def add_commands(commands: Commands) -> None:
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
    configure_process()
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # for a recipe's own modules
    try:
        with print_messages():
            resolve_name(function)(options)
        return 0
    except (InvalidInput, NotFound) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (DubitoError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        message = "stopped; to resume from the last checkpoint, run the same command again"
        print(f"\n{message}", file=sys.stderr)
        return 130


add_command = partial(_add_command, run=run)


def configure_process() -> None:
    """Configure threads, memory and garbage collection. Call this before importing torch.

    Torch's threads synchronise about fifty times per step. Long spinning takes CPU time from
    threads that wait for a core. A spin count of 4,000 lasts microseconds and still avoids most
    wake-ups.

    By default, glibc returns blocks of more than 32 MB, such as activations of convolutions, to the
    system, and mapping them again is slow. Other C libraries have no `mallopt`.

    At exit, the last collection would visit all objects of torch, which takes more than a second.
    """
    gc.set_threshold(GC_THRESHOLD)
    atexit.register(gc.freeze)
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
    for name in names:
        parser.add_argument(name, **SHARED_OPTIONS[name])


def _command(commands: Commands, name: str, summary: str, *options: str) -> Any:
    parser = add_command(commands, name, f"training.commands.actions:{name}", summary)
    add_options(parser, *options)
    return parser.add_argument


def _add_fit(commands: Commands) -> None:
    summary = "fit a recipe on its data and publish the model"
    options = *DATA_OPTIONS, "--anyway", "--device", "--quiet", "--json"
    add = _command(commands, "fit", summary, *options)
    add("recipe", type=Path, nargs="?", help="TOML file (default: a new recipe for --data)")
    add("--data", metavar="SRC", help="instead of the recipe's source: digits, csv:FILE, ...")
    add("--recipe-out", type=Path, metavar="FILE", help="new recipe (default: NAME.toml)")
    add("--leave-out", metavar="CLASS", action="append", help="fit without this class; repeatable")
    add("--name", help="publish under this name instead of the recipe's")
    add("--seed", type=int, help="instead of the recipe's seed")
    add("--warm-start", metavar="NAME[:VERSION]", help="start from a published version's weights")


def _add_inspect(commands: Commands) -> None:
    summary = "show the task, columns and warnings of a data source"
    add = _command(commands, "inspect", summary, *DATA_OPTIONS, "--json")
    sources = "csv:FILE, parquet:FILE, npz:FILE, images:FOLDER"
    add("--data", metavar="SRC", required=True, help=sources)


def _add_prune(commands: Commands) -> None:
    summary = "prune the least certain weights of a Bayes by Backprop model, and publish it"
    add = _command(commands, "prune", summary, "--as", "--anyway")
    add("model", **VERSION)
    add("--fraction", type=float, required=True, help="share of weights to remove, such as .75")
    add("--data", metavar="SRC", help="new location of the fit's data, if it has moved")


def _add_calibrate(commands: Commands) -> None:
    summary = "calibrate a model on other data, and publish it"
    add = _command(commands, "calibrate", summary, "--target", "--as", "--quiet")
    add("model", **VERSION)
    source_help = "labelled rows that the model was not fitted on"
    add("--data", metavar="SRC", required=True, help=source_help)
    rows_help = "default: the version's number, up to a third of the rows"
    for split in ("reference", "ranking"):
        add(f"--{split}-rows", type=int, metavar="N", help=rows_help)
    add("--seed", type=int, default=0, help="seed of the splits and draws")


def _add_evaluate(commands: Commands) -> None:
    summary = "evaluate a published version, and store the report with it"
    add = _command(commands, "evaluate", summary, *TEST_OPTIONS, "--quiet", "--json")
    add("model", **VERSION)
    sources = "rows unlike the data (images:PATH, npz:FILE, csv:FILE, parquet:FILE); repeatable"
    add("--outliers", metavar="NAME=SRC", action="append", default=[], help=sources)


def _add_compare(commands: Commands) -> None:
    summary = "compare two published versions on the same test rows"
    add = _command(commands, "compare", summary, *TEST_OPTIONS, "--json")
    add("first", **VERSION)
    add("second", metavar="NAME[:VERSION]", help="the version to compare with it")


def _add_candidate(commands: Commands) -> None:
    summary = "fit a candidate on labels from the service, and compare it with `latest`"
    add = _command(commands, "candidate", summary, "--device")
    add("model", metavar="NAME", help="the model whose `latest` the candidate starts from")
    add("--state", type=Path, metavar="DIR", help="state folder (default: DUBITO_STATE or `state`)")
    add("--data", metavar="SRC", help="new location of the version's data, if it has moved")
    add("--min-labels", type=int, default=1, metavar="N", help="minimum number of new labels")
    promote_help = "serve the candidate if it is no worse and every label was sent with a key"
    add("--promote", action=argparse.BooleanOptionalAction, default=False, help=promote_help)
    add("--watch", action="store_true", help="poll for new labels until interrupted")
