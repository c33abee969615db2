"""Command-line parser for `dubito store`.

`model_store/maintenance.py`, which has the functions, is imported when a command runs, so that help
and completion are fast.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from pkgutil import resolve_name
from typing import TypeAlias

from model_store.errors import DubitoError
from model_store.processes import open_standard_files

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

REPEAT_S = 60

SUMMARY = "list, show, verify, sign and delete versions, and move their aliases"


def add_commands(commands: Commands) -> None:
    add_store_commands(commands.add_parser("store", help=SUMMARY, description=SUMMARY))


def add_store_commands(parser: argparse.ArgumentParser) -> None:
    help = "a folder or s3://bucket/prefix, overrides DUBITO_STORE"
    parser.add_argument("--store", metavar="PLACE", help=help)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add(commands, "list", "list every model, its versions and aliases", "list_versions")
    show = _add(commands, "show", "describe a version")
    _add_version(show)
    help = "check its signature against these public keys (a file or a folder)"
    show.add_argument("--key", type=Path, metavar="FILE", help=help)
    verify = _add(commands, "verify", "check every file of every version against its manifest")
    help = "and every signature against these public keys (a file or a folder)"
    verify.add_argument("--key", type=Path, metavar="FILE", help=help)
    summary = "point an alias at a version that can be served, or remove it; `latest` rolls back"
    alias = _add(commands, "alias", summary)
    alias.add_argument("name")
    alias.add_argument("alias")
    alias.add_argument("version", nargs="?", help="a number or another alias")
    alias.add_argument("--remove", action="store_true", help="remove the alias; its version stays")
    help = "do not check whether the version can be served"
    alias.add_argument("--anyway", action="store_true", help=help)
    summary = "delete all versions except the newest N and those with an alias"
    keep = _add(commands, "keep", summary)
    keep.add_argument("name")
    keep.add_argument("newest", type=int)
    delete = _add(commands, "delete", "delete a version, or a model with all of its versions")
    help = "VERSION is a number; all if none is given"
    delete.add_argument("version", metavar="NAME[:VERSION]", help=help)
    help = "also versions with an alias, which is removed"
    delete.add_argument("--force", action="store_true", help=help)
    summary = "make a private key to sign with, FILE, and its public one, FILE.pub"
    keygen = _add(commands, "keygen", summary)
    keygen.add_argument("file", type=Path, metavar="FILE")
    sign = _add(commands, "sign", "check and sign a version")
    _add_version(sign)
    sign.add_argument("--key", type=Path, metavar="FILE", required=True, help="the private key")


def _add(
    commands: Commands, name: str, summary: str, function: str | None = None
) -> argparse.ArgumentParser:
    return add_command(commands, name, f"model_store.maintenance:{function or name}", summary)


def _add_version(parser: argparse.ArgumentParser) -> None:
    help = "a number or an alias, by default latest"
    parser.add_argument("version", metavar="NAME[:VERSION]", help=help)


def run(function: str, options: argparse.Namespace) -> int:
    """Run a command and return its exit code, which is 2 for invalid options or settings."""
    open_standard_files()
    try:
        code = int(resolve_name(function)(options) or 0)
        sys.stdout.flush()
        return code
    except DubitoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # The reader of the output, such as `head`, has ended.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def add_command(
    commands: Commands,
    name: str,
    function: str,
    summary: str,
    run: Callable[[str, argparse.Namespace], int] = run,
) -> argparse.ArgumentParser:
    """Add a command that calls `function` (`module:function`) with the parsed options."""
    parser = commands.add_parser(name, help=summary, description=summary)
    parser.set_defaults(run=partial(run, function))
    return parser


def run_command(parser: argparse.ArgumentParser, arguments: list[str] | None) -> int:
    options = parser.parse_args(arguments)
    return options.run(options)


def repeat(
    attempt: Callable[[], None],
    report: Callable[[str], None],
    report_error: Callable[[str], None],
) -> None:
    """Call a function every minute until an interrupt.

    Errors are reported, because they may be fixed before the next call.
    """
    for number in count(1):
        try:
            attempt()
        except DubitoError as error:
            report_error(str(error))
        try:
            if number == 1:
                report(f"repeating every {REPEAT_S} s")
            time.sleep(REPEAT_S)
        except KeyboardInterrupt:  # An interrupt between two calls is not an error.
            return
