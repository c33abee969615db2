"""The client's commands, for the page of help; `dubito.asking` does them."""

import argparse

from dubito.command_names import COMMANDS

SECTIONS = {"Ask a service": COMMANDS}


def parser(_: str) -> argparse.ArgumentParser:
    from dubito.asking import parser

    return parser()


def run(command: str, arguments: list[str]) -> int:
    from dubito.asking import run

    return run([command, *arguments])
