"""Where commands find and put things, by the environment, and the options that they share."""

import argparse
import os
from pathlib import Path

from model_store.artifacts.store import ModelStore


def store() -> ModelStore:
    """Return the model store, of DUBITO_STORE."""
    return ModelStore(Path(os.environ.get("DUBITO_STORE", "models")))


def runs() -> Path:
    """Return the folder of runs, DUBITO_RUNS."""
    return Path(os.environ.get("DUBITO_RUNS", "runs"))


def data_root() -> Path:
    """Return the folder that relative data are in, DUBITO_DATA."""
    return Path(os.environ.get("DUBITO_DATA", "data"))


def add_version(parser: argparse.ArgumentParser) -> None:
    """Add the published version that a command is about."""
    parser.add_argument("model", metavar="NAME[:VERSION]", help="VERSION is a number or an alias, by default latest")


def add_new_name(parser: argparse.ArgumentParser) -> None:
    """Add the name that a command publishes under."""
    parser.add_argument("--as", dest="name", metavar="NEWNAME", help="publish under this name in place of its own")
