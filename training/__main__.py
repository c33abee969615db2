"""`inspect` data; `fit`, `prune` and `calibrate` models; `evaluate` and `compare` them; `candidate`
learns on, `active` says how many labels would have been needed, and `reproduce` measures the
papers' tables and figures (`certify` those that say how good posteriors are).
"""

import argparse
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from model_store.errors import DubitoError, InvalidInput, NotFound
from training import log
from training.command_names import COMMANDS
from training.commands import candidate, experiments, fit, versions

DONE = 0
FAILED = 1
WRONG_INPUT = 2
INTERRUPTED = 130


def main(arguments: list[str] | None = None, prog: str = "python -m training") -> int:
    """Run a command; return the exit code: 0 done, 1 failed, 2 wrong input, 130 interrupted."""
    options = parser_of(prog).parse_args(arguments)
    is_quiet = options.command == "calibrate" and options.quiet  # of the others it hides bars alone
    try:
        with print_messages(is_quiet):
            options.run(options)
        return DONE
    except (InvalidInput, NotFound) as error:
        print(f"error: {error}", file=sys.stderr)
        return WRONG_INPUT
    except (DubitoError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print(
            "\nstopped; run the same command again to go on from the last checkpoint",
            file=sys.stderr,
        )
        return INTERRUPTED


def parser_of(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=prog, description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    fit.add_fit(commands)
    fit.add_inspect(commands)
    versions.add_prune(commands)
    versions.add_calibrate(commands)
    versions.add_evaluate(commands)
    versions.add_compare(commands)
    candidate.add_candidate(commands)
    experiments.add_experiments(commands)
    for name, command in commands.choices.items():
        command.description = COMMANDS[name]
    return parser


@contextmanager
def print_messages(is_quiet: bool = False) -> Iterator[None]:
    """Print what training says to standard error, the message alone; of a quiet command, none."""
    handler, level = logging.StreamHandler(sys.stderr), log.level
    handler.setFormatter(logging.Formatter("%(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.WARNING if is_quiet else logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


if __name__ == "__main__":
    sys.exit(main())
