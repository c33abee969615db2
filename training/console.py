"""The commands of `python -m training`, for the page of help of `dubito`."""

from training.command_names import COMMANDS

SECTIONS = {"Fit": COMMANDS}


def run(command: str, arguments: list[str]) -> int:
    from training.__main__ import main

    return main([command, *arguments], "dubito")
