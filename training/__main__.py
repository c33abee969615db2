"""Inspect data, fit models, and evaluate and compare versions."""

import argparse
import sys

from model_store.commands import run_command
from training.commands import add_commands


def main(arguments: list[str] | None = None) -> int:
    """Run a command, and return its exit code.

    Exit codes are 0 (success), 1 (failure), 2 (bad input) and 130 (interrupt).
    """
    parser = argparse.ArgumentParser("python -m training", description=__doc__)
    add_commands(parser.add_subparsers(metavar="COMMAND", required=True))
    return run_command(parser, arguments)


if __name__ == "__main__":
    sys.exit(main())
