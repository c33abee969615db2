"""`python -m model_store COMMAND`: look after a model store. `dubito store` is the same."""

import argparse
import sys

from model_store.commands import add_store_commands


def main(arguments: list[str] | None = None) -> int:
    """Run a command; return the exit code: 0 done, 1 a version is broken, 2 a wrong call."""
    parser = argparse.ArgumentParser("python -m model_store", description=__doc__)
    add_store_commands(parser)
    options = parser.parse_args(arguments)
    code: int = options.run(options)
    return code


if __name__ == "__main__":
    sys.exit(main())
