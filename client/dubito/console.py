"""The client's commands, for the page of help; `dubito.asking` does them."""

from dubito.command_names import COMMANDS

SECTIONS = {"Ask a service": COMMANDS}


def run(command: str, arguments: list[str]) -> int:
    from dubito.asking import run

    return run([command, *arguments])
