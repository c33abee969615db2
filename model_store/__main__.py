"""Manage a model store. The same commands are available as `dubito store`."""

import argparse
import sys

from model_store.commands import add_store_commands, run_command


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m model_store", description=__doc__)
    add_store_commands(parser)
    return run_command(parser, arguments)


if __name__ == "__main__":
    sys.exit(main())
