"""Run the service with `python -m service [--port N]`, or another command with
`python -m service COMMAND`. docs/settings.md lists the settings."""

import argparse
import sys

from model_store.commands import run, run_command
from service.commands import add_commands
from service.server.supervisor import WorkerPlace


def main(arguments: list[str] | None = None) -> int:
    """Run the service or another command. Return the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == [WorkerPlace.OPTION]:
        return run("service.serve:serve_as_worker", argparse.Namespace(place=arguments[1:]))
    if not arguments or (arguments[0].startswith("-") and arguments[0] not in ("-h", "--help")):
        arguments = ["serve", *arguments]
    parser = argparse.ArgumentParser("python -m service", description=__doc__)
    add_commands(parser.add_subparsers(metavar="COMMAND", required=True))
    return run_command(parser, arguments)


if __name__ == "__main__":
    sys.exit(main())
