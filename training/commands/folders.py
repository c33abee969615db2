"""Where commands find and put things, by the environment, and the options that they share."""

import argparse
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from model_store.artifacts.place import store_of_environment
from model_store.artifacts.store import ModelStore
from model_store.errors import InvalidInput
from training.recipe import DataSection


def store(writes: bool = True) -> ModelStore:
    """Return the model store, of DUBITO_STORE.

    Raises:
        InvalidInput: if it is no bucket, or, for a command that `writes`, one that writers cannot
            share.
    """
    found = store_of_environment()
    if writes:
        found.storage.check_writable()  # now, rather than when hours have gone by
    return found


def runs() -> Path:
    """Return the folder of runs, DUBITO_RUNS."""
    return Path(os.environ.get("DUBITO_RUNS", "runs"))


def data_root() -> Path:
    """Return the folder that relative data are in, DUBITO_DATA."""
    return Path(os.environ.get("DUBITO_DATA", "data"))


def add_data(parser: argparse.ArgumentParser) -> None:
    """Add how data are read and split, as a recipe's `[data]` says it otherwise."""
    parser.add_argument(
        "--target", metavar="COLUMN", help="what to predict of csv: and parquet: data"
    )
    parser.add_argument(
        "--task", choices=["classification", "regression"], help="if the target should not decide"
    )
    parser.add_argument(
        "--group", metavar="COLUMN", help="rows of one group are never in two splits"
    )
    parser.add_argument("--time", metavar="COLUMN", help="the latest rows calibrate and test")
    parser.add_argument(
        "--missing-value",
        metavar="TEXT",
        action="append",
        help="what cells say that count as missing",
    )
    parser.add_argument(
        "--ignore", metavar="COLUMN", action="append", help="a column that is left out"
    )


def data_section(options: argparse.Namespace) -> DataSection:
    """Return what the options of `add_data` and `--data` say."""
    given: dict[str, Any] = {"source": options.data}
    given |= {
        key: getattr(options, key)
        for key in ("target", "group", "time")
        if getattr(options, key) is not None
    }
    given |= {"missing_values": options.missing_value} if options.missing_value else {}
    given |= {"columns": dict.fromkeys(options.ignore, "ignored")} if options.ignore else {}
    try:
        return DataSection.model_validate(given)
    except ValidationError as error:
        raise InvalidInput(
            "options", str(error.errors()[0]["msg"]).removeprefix("Value error, "), "both"
        ) from None


def add_version(parser: argparse.ArgumentParser) -> None:
    """Add the published version that a command is about."""
    parser.add_argument(
        "model", metavar="NAME[:VERSION]", help="VERSION is a number or an alias, by default latest"
    )


def add_new_name(parser: argparse.ArgumentParser) -> None:
    """Add the name that a command publishes under."""
    parser.add_argument(
        "--as", dest="name", metavar="NEWNAME", help="publish under this name in place of its own"
    )


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a run's folder, so that two processes never write one run.

    Raises:
        InvalidInput: if another process holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InvalidInput(
                "run", "a run that no other process works on", f"{folder}, which one does"
            ) from None
        yield
