"""The commands of `python -m training`, for the page of help of `dubito`."""

import argparse
import sys
from pathlib import Path

from training.command_names import COMMANDS

SECTIONS = {"Fit": COMMANDS}


def parser(_: str) -> argparse.ArgumentParser:
    from training.__main__ import parser_of

    return parser_of("dubito")


def run(command: str, arguments: list[str]) -> int:
    sys.path.insert(0, str(Path.cwd()))  # as `python -m` does: a recipe may name a module there
    from training.__main__ import main

    return main([command, *arguments], "dubito")
