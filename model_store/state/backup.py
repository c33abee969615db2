"""Back up a state folder while it is in use, or restore it.

The file contains the results of finished jobs, the input of unfinished jobs, which start again
after a restore, and the database. The database is last, so a truncated file has none.
"""

import json
import os
import shutil
import sqlite3
import tarfile
from contextlib import closing, suppress
from pathlib import Path
from typing import BinaryIO

from model_store.artifacts.disk import locked
from model_store.errors import InvalidInput
from model_store.state.database import FILE, Database
from model_store.state.jobs import FOLDER
from model_store.state.labels import has_state

COPY, LOCK = "backup.sqlite", "backup.lock"


def back_up(folder: Path | None, archive: BinaryIO) -> None:
    if folder is None or not has_state(folder):
        raise InvalidInput("DUBITO_STATE", "the folder of a service's state", "none, or another")
    copy = folder / COPY
    with locked(folder / LOCK), tarfile.open(fileobj=archive, mode="w|") as tar:
        try:
            copy.unlink(missing_ok=True)  # of a killed backup
            copy.touch(0o600)
            with (
                closing(Database(folder)) as database,
                closing(sqlite3.connect(copy)) as copied,
                database.reading() as connection,
            ):
                connection.backup(copied)
            with closing(sqlite3.connect(copy)) as copied:
                jobs = copied.execute(
                    "SELECT id, state, outcome FROM jobs "
                    "WHERE state IN ('queued', 'running', 'done')"
                ).fetchall()
            for name, state, outcome in jobs:
                with suppress(FileNotFoundError):  # the job was deleted or ended
                    for file in sorted((folder / FOLDER / name).iterdir()):
                        is_result = state == "done" and file.name == json.loads(outcome)
                        if file.is_file() and (is_result or state != "done"):
                            tar.add(file, f"{FOLDER}/{name}/{file.name}", filter=_private)
            tar.add(copy, FILE, filter=_private)
        finally:
            copy.unlink(missing_ok=True)


def _private(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.mode = 0o600
    return member


def restore(folder: Path | None, archive: BinaryIO) -> None:
    """Restore a backup to an empty state folder, or raise InvalidInput or StateUnusable."""
    if folder is None or (folder.exists() and any(folder.iterdir())):
        raise InvalidInput("DUBITO_STATE", "an empty folder, or none yet", "one with files, or ''")
    before = os.umask(0o077)
    try:
        with tarfile.open(fileobj=archive, mode="r|") as tar:
            tar.extractall(folder, filter="data")
        if not (folder / FILE).exists():
            raise tarfile.TarError
    except BaseException as error:
        for path in folder.iterdir() if folder.exists() else ():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        if not isinstance(error, tarfile.TarError):
            raise
        expected = "all that `dubito backup` wrote"
        raise InvalidInput("standard input", expected, "another or a truncated file") from None
    finally:
        os.umask(before)
    Database(folder).close()
