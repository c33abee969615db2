"""Run the service with `python -m service [--port N]`, or another command with
`python -m service COMMAND`. docs/settings.md lists the settings."""

import argparse
import sys

from model_store.commands import run_command
from service.commands import add_commands
from service.serve import serve_as_worker
from service.server.supervisor import WorkerPlace


def main(arguments: list[str] | None = None) -> int:
    """Run the service or another command.

    Returns:
        The exit code: 0 after a normal stop, 2 for an invalid setting, 3 if the start failed.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == [WorkerPlace.OPTION]:
        return serve_as_worker(arguments[1:])
    if not arguments or (arguments[0].startswith("-") and arguments[0] not in ("-h", "--help")):
        arguments = ["serve", *arguments]
    parser = argparse.ArgumentParser("python -m service", description=__doc__)
    add_commands(parser.add_subparsers(metavar="COMMAND", required=True))
    return run_command(parser, arguments)


if __name__ == "__main__":
    sys.exit(main())
