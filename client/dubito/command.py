"""`dubito` on the command line: one page of help, and the commands of the packages that are there.

A package adds its own by an entry point of the group `dubito.commands`: a light module like
`dubito.console`, whose `SECTIONS` are what the page shows, and whose `run` does a command.
"""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, entry_points, version
from typing import Protocol, cast

from dubito import console
from dubito.command_names import COMPLETION, ENVIRONMENT

GROUP = "dubito.commands"
USAGE = """usage: dubito COMMAND ...

A prediction service that knows when it doubts. `dubito COMMAND --help` says what a command takes.
"""


class Console(Protocol):
    @property
    def SECTIONS(self) -> Mapping[str, Mapping[str, str]]:
        """By section of the page: the commands, and what they do."""

    def parser(self, command: str) -> argparse.ArgumentParser:
        """Return the parser of a command, or one that has it as a subcommand."""

    def run(self, command: str, arguments: list[str]) -> int:
        """Do a command, and return the exit status."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Do a command, and return its exit status; 2 where there is none of that name."""
    name, *others = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if name in ("-h", "--help"):
        print(page())
        return 0
    if name == "--version":
        print(f"dubito-client {_version()}".strip())
        return 0
    if name == "completion":
        return _complete(others)
    for one in consoles():
        if any(name in commands for commands in one.SECTIONS.values()):
            return _run(one, name, others)
    print(f"dubito: expected a command that `dubito --help` lists, got {name}", file=sys.stderr)
    return 2


def consoles() -> Iterator[Console]:
    yield console
    for point in sorted(entry_points(group=GROUP)):
        yield cast(Console, point.load())


def page() -> str:
    sections: dict[str, dict[str, str]] = {}
    for one in consoles():
        for title, commands in one.SECTIONS.items():
            sections.setdefault(title, {}).update(commands)
    width = max(len(name) for commands in sections.values() for name in commands)
    lines = [USAGE]
    for title, commands in sections.items():
        lines += [
            f"{title}:",
            *(f"  {name:{width}}  {does}" for name, does in commands.items()),
            "",
        ]
    return "\n".join([*lines, ENVIRONMENT])


def _complete(arguments: list[str]) -> int:
    """Print what has a shell complete commands and options."""
    from dubito.completion import SHELLS, script

    parser = argparse.ArgumentParser("dubito completion", description=COMPLETION)
    parser.add_argument("shell", choices=SHELLS)
    asked = parser.parse_args(arguments)
    commands: dict[str, str] = {}
    parsers: dict[str, argparse.ArgumentParser] = {}
    for one in consoles():
        of_one = {name: does for some in one.SECTIONS.values() for name, does in some.items()}
        commands |= of_one
        try:
            parsers |= {name: one.parser(name) for name in of_one if name != "completion"}
        except ModuleNotFoundError:  # of an extra that is not installed: its commands alone
            continue
    print(script(asked.shell, commands, parsers))
    return 0


def _run(one: Console, name: str, arguments: list[str]) -> int:
    try:
        return one.run(name, arguments)
    except ModuleNotFoundError as error:  # of an extra that is not installed
        print(f"dubito: {name}: {error}", file=sys.stderr)
        return 1


def _version() -> str:
    try:
        return version("dubito-client")
    except PackageNotFoundError:  # not installed, but found
        return ""
