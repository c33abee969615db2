"""`inspect` data; `fit`, `prune` and `calibrate` models; `evaluate` and `compare` them; `candidate`
learns on, and `active` says how many labels would have been needed.
"""

import argparse
import sys

from model_store.errors import DubitoError, InvalidInput, NotFound
from training.commands import active, calibrate, candidate, compare, evaluate, fit, inspect, prune
from training.messages import printed

COMMANDS = {
    "fit": fit,
    "inspect": inspect,
    "prune": prune,
    "calibrate": calibrate,
    "evaluate": evaluate,
    "compare": compare,
    "candidate": candidate,
    "active": active,
}
DONE = 0
FAILED = 1
WRONG_INPUT = 2
INTERRUPTED = 130


def main(arguments: list[str] | None = None) -> int:
    """Run a command; return the exit code: 0 done, 1 failed, 2 wrong input, 130 interrupted."""
    parser = argparse.ArgumentParser(prog="python -m training", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, command in COMMANDS.items():
        command.add_arguments(commands.add_parser(name, help=command.HELP))
    options = parser.parse_args(arguments)
    try:
        with printed(
            is_quiet=options.command == "calibrate" and options.quiet
        ):  # of the others it hides bars alone
            COMMANDS[options.command].run(options)
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


if __name__ == "__main__":
    sys.exit(main())
