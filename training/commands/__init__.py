"""The commands of `python -m training`, which `dubito` has too: their options.

A command's module is imported when the command runs, so that help and completion are fast. To add
a command, add its options here and its function in a module of this folder.
"""

import argparse
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import TypeAlias

from model_store.errors import DubitoError, InvalidInput, NotFound
from training import log

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

CHECKOUT = Path(__file__).parents[2]  # unless the package is installed
DONE = 0
FAILED = 1
WRONG_INPUT = 2
INTERRUPTED = 130


def add_commands(commands: Commands) -> None:
    """Add the commands of this package, and in a checkout those of `experiments`."""
    _add_inspect(commands)
    _add_fit(commands)
    _add_evaluate(commands)
    _add_compare(commands)
    _add_calibrate(commands)
    _add_prune(commands)
    _add_candidate(commands)
    if (CHECKOUT / "experiments" / "command.py").exists():
        if str(CHECKOUT) not in sys.path:
            sys.path.append(str(CHECKOUT))
        resolve_name("experiments.command:add_commands")(commands)


def add_command(
    commands: Commands, name: str, function: str, about: str
) -> argparse.ArgumentParser:
    """Add a command that calls `function`, named as `module:function`, with its options."""
    parser = commands.add_parser(name, help=about, description=about)
    parser.set_defaults(run=partial(run, function))
    return parser


def run(function: str, options: argparse.Namespace) -> int:
    """Run a command; return the exit code: 0 done, 1 failed, 2 wrong input, 130 interrupted."""
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # a recipe may name a module there
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
        print(
            "\nstopped; run the same command again to go on from the last checkpoint",
            file=sys.stderr,
        )
        return INTERRUPTED


@contextmanager
def print_messages() -> Iterator[None]:
    """Print the messages of training to standard error, without prefix."""
    handler, level = logging.StreamHandler(sys.stderr), log.level
    handler.setFormatter(logging.Formatter("%(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


def _add_fit(commands: Commands) -> None:
    parser = add_command(
        commands,
        "fit",
        "training.commands.fit:fit",
        "fit a recipe on its data and publish the model",
    )
    add = parser.add_argument
    add(
        "recipe",
        type=Path,
        nargs="?",
        help="a TOML file, such as recipes/digits.toml; without one, of the data",
    )
    add("--data", metavar="SRC", help="in place of the recipe's source: digits, csv:FILE, ...")
    _add_data(parser)
    add(
        "--recipe-out",
        type=Path,
        metavar="FILE",
        help="without a recipe: where it is kept, by default NAME.toml",
    )
    add(
        "--leave-out",
        metavar="CLASS",
        action="append",
        help="fit without a class; may be given several times",
    )
    add("--name", help="publish under this name in place of the recipe's")
    add("--seed", type=int, help="in place of the recipe's seed")
    add("--warm-start", metavar="NAME[:VERSION]", help="go on from a published version's weights")
    add("--again", action="store_true", help="fit also what a version was fitted from already")
    _add_anyway(parser)
    add_device(parser)
    add("--quiet", action="store_true", help="no progress bar")
    _add_json(parser)


def _add_inspect(commands: Commands) -> None:
    parser = add_command(
        commands,
        "inspect",
        "training.commands.fit:inspect",
        "show what data are taken for, before anything is fitted",
    )
    parser.add_argument(
        "--data",
        metavar="SRC",
        required=True,
        help="csv:FILE, parquet:FILE, npz:FILE, images:FOLDER",
    )
    _add_data(parser)
    _add_json(parser)


def _add_data(parser: argparse.ArgumentParser) -> None:
    add_target(parser)
    add = parser.add_argument
    add("--task", choices=["classification", "regression"], help="if the target should not decide")
    add("--group", metavar="COLUMN", help="rows of one group are never in two splits")
    add("--time", metavar="COLUMN", help="the latest rows calibrate and test")
    add(
        "--missing-value",
        metavar="TEXT",
        action="append",
        help="what cells say that count as missing",
    )
    add("--date-format", metavar="FORMAT", help="how dates are written, such as %%d/%%m/%%Y")
    add("--decimal", metavar="MARK", help="of numbers in CSV, a point or a comma")
    add("--thousands", metavar="MARK", help="what groups the digits of numbers in CSV")
    add("--ignore", metavar="COLUMN", action="append", help="a column that is left out")


def _add_prune(commands: Commands) -> None:
    parser = add_command(
        commands,
        "prune",
        "training.commands.versions:prune",
        "publish a Bayes by Backprop model without its least certain weights",
    )
    _add_version(parser)
    parser.add_argument(
        "--fraction",
        type=float,
        required=True,
        help="of all weights, how many are removed, such as .75",
    )
    _add_new_name(parser)
    parser.add_argument(
        "--data",
        metavar="SRC",
        help="where the data of its fit are now, if no longer where they were",
    )
    _add_anyway(parser)


def _add_calibrate(commands: Commands) -> None:
    parser = add_command(
        commands,
        "calibrate",
        "training.commands.versions:calibrate",
        "publish a model again, calibrated on other data",
    )
    _add_version(parser)
    add = parser.add_argument
    add(
        "--data",
        metavar="SRC",
        required=True,
        help="rows that the model was not fitted on, with labels or targets",
    )
    add_target(parser)
    _add_new_name(parser)
    for split in ("reference", "ranking"):
        add(
            f"--{split}-rows",
            type=int,
            metavar="N",
            help="by default as many as now, at most a third of the rows (or a quarter)",
        )
    add(
        "--temperature",
        action="store_true",
        help="fit the temperature again first, on as many other rows as there are reference rows",
    )
    add("--seed", type=int, default=0, help="of how the rows are split, and of the draws")
    add("--quiet", action="store_true", help="no progress, only what was published")


def _add_evaluate(commands: Commands) -> None:
    parser = add_command(
        commands,
        "evaluate",
        "training.commands.versions:evaluate",
        "measure a published version and keep the report with it",
    )
    _add_version(parser)
    add = parser.add_argument
    add("--data", metavar="SRC", help="other rows than the test rows of its fit")
    add(
        "--outliers",
        metavar="NAME=SRC",
        action="append",
        default=[],
        help="rows unlike the data: images:PATH, npz:FILE, idx:DIR, of tables and text csv:FILE; "
        "may be given several times",
    )
    add("--attacks", action="store_true", help="attack the test rows of a classification")
    add("--draws", type=int, help="of each row, by default the version's own number")
    add("--rows", type=int, default=1000, help="of each set, at most")
    add("--seed", type=int, default=0, help="of which rows and draws")
    add("--quiet", action="store_true", help="no progress bar")
    _add_json(parser)


def _add_compare(commands: Commands) -> None:
    parser = add_command(
        commands,
        "compare",
        "training.commands.versions:compare",
        "compare two published versions on the same test rows",
    )
    _add_version(parser, "first")
    add = parser.add_argument
    add("second", metavar="NAME[:VERSION]", help="what is compared with it")
    add("--data", metavar="SRC", help="other rows than the test rows of the first one's fit")
    add("--draws", type=int, help="of each row, by default each version's own number")
    add("--rows", type=int, default=1000, help="at most")
    add("--seed", type=int, default=0, help="of which rows and draws")
    _add_json(parser)


def _add_new_name(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--as", dest="name", metavar="NEWNAME", help="publish under this name in place of its own"
    )


def _add_candidate(commands: Commands) -> None:
    parser = add_command(
        commands,
        "candidate",
        "training.commands.candidate:candidate",
        "fit a candidate on labels from the service; promote it if it is no worse",
    )
    add = parser.add_argument
    add("model", metavar="NAME", help="the model whose `latest` the candidate begins at")
    add(
        "--state",
        type=Path,
        metavar="DIR",
        help="the service's state, by default DUBITO_STATE or `state`",
    )
    add("--data", metavar="SRC", help="where the version's data are, if not where they were")
    add("--min-labels", type=int, default=1, metavar="N", help="do nothing with fewer new ones")
    add("--watch", action="store_true", help="wait for labels, again and again")
    add("--interval-s", type=float, default=60.0, metavar="S", help="between looks, with --watch")
    add_device(parser)


def add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])


def _add_anyway(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--anyway", action="store_true", help="publish also what is worse than a guess"
    )


def add_target(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--target", metavar="COLUMN", help="what to predict of csv: and parquet: data"
    )


def _add_version(parser: argparse.ArgumentParser, name: str = "model") -> None:
    parser.add_argument(
        name, metavar="NAME[:VERSION]", help="VERSION is a number or an alias, by default latest"
    )


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
