"""Back up a state folder to a tar file while it is in use, and restore it.

The file contains the database, the results of finished jobs, and the input of unfinished jobs,
which start again after a restore.
"""

import json
import os
import sqlite3
import tarfile
from contextlib import closing, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO

from model_store.errors import InvalidInput
from model_store.state.database import FILE, Database
from model_store.state.jobs import FOLDER
from model_store.state.labels import has_state


def back_up(folder: Path | None, archive: BinaryIO) -> None:
    """Write a state folder to a tar file."""
    if folder is None or not has_state(folder):
        raise InvalidInput("DUBITO_STATE", "the folder of a service's state", "none, or another")
    with (
        TemporaryDirectory(prefix="backup-", dir=folder) as temporary,
        tarfile.open(fileobj=archive, mode="w|") as tar,
    ):
        copy = Path(temporary)
        with (
            closing(Database(folder)) as database,
            closing(sqlite3.connect(copy / FILE)) as target,
            database.reading() as connection,
        ):
            connection.backup(target)
        tar.add(copy / FILE, FILE, filter=_private)
        with closing(sqlite3.connect(copy / FILE)) as copied:
            jobs = copied.execute(
                "SELECT id, state, outcome FROM jobs WHERE state IN ('queued', 'running', 'done')"
            )
            for name, state, outcome in jobs:
                with suppress(FileNotFoundError):  # the job was deleted or ended
                    for file in sorted((folder / FOLDER / name).iterdir()):
                        is_result = state == "done" and file.name == json.loads(outcome)
                        if file.is_file() and (is_result or state != "done"):
                            tar.add(file, f"{FOLDER}/{name}/{file.name}", filter=_private)


def _private(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.mode = 0o600
    return member


def restore(folder: Path | None, archive: BinaryIO) -> None:
    """Restore a state folder from a backup.

    Raises:
        InvalidInput: if the folder is not empty, or the file is not a backup.
        StateUnusable: if the folder cannot be written to.
    """
    if folder is None or (folder.exists() and any(folder.iterdir())):
        raise InvalidInput("DUBITO_STATE", "an empty folder, or none yet", "one with files, or ''")
    before = os.umask(0o077)
    try:
        with tarfile.open(fileobj=archive, mode="r|") as tar:
            tar.extractall(folder, filter="data")
    except tarfile.TarError:
        expected = "what `dubito backup` wrote"
        raise InvalidInput("standard input", expected, "something else") from None
    finally:
        os.umask(before)
    Database(folder).close()
