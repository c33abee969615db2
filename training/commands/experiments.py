"""Commands of the package `experiments`, which is in a checkout but not in an installation."""

import argparse
import importlib
from typing import NoReturn

from model_store.errors import InvalidInput
from training.command_names import COMMANDS
from training.commands import Commands

NAMES = ("active", "certify", "reproduce")
MODULE = "experiments.command"


def add_experiments(commands: Commands) -> None:
    try:
        module = importlib.import_module(MODULE)
    except ModuleNotFoundError as error:
        if error.name not in ("experiments", MODULE):
            raise
    else:
        module.add_commands(commands)
        return
    for name in NAMES:
        parser = commands.add_parser(name, help=COMMANDS[name])
        parser.add_argument("arguments", nargs=argparse.REMAINDER)
        parser.set_defaults(run=_reject)


def _reject(options: argparse.Namespace) -> NoReturn:
    expected = "a checkout of Dubito as the current folder, because it needs the folder experiments"
    raise InvalidInput(options.command, expected, "an installation")
