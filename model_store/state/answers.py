"""Answers to requests with an Idempotency-Key, which are repeated for a day."""

import sqlite3
import time
from dataclasses import dataclass

from model_store.errors import InvalidInput
from model_store.state.database import Database

RETENTION_S = 86_400.0
UNUSED = "one that no other request came with within a day"


class Repeated(Exception):
    """The request has been answered before."""

    def __init__(self, answer: bytes) -> None:
        super().__init__()
        self.answer = answer


@dataclass(frozen=True)
class Repeatable:
    """A request that can be repeated: its owner, its key, and the digest of its content."""

    owner: str
    key: str
    digest: str

    def refuse_again(self, connection: sqlite3.Connection) -> None:
        """Raise Repeated if this request was answered, InvalidInput if another with its key was."""
        row = connection.execute(
            "SELECT digest, answer FROM answers WHERE owner = ? AND key = ? AND time > ?",
            (self.owner, self.key, time.time() - RETENTION_S),
        ).fetchone()
        if row is not None and row["digest"] != self.digest:
            raise InvalidInput("Idempotency-Key", UNUSED, "one of another request")
        if row is not None:
            raise Repeated(row["answer"])

    def keep(self, connection: sqlite3.Connection, answer: bytes) -> None:
        """Save the answer in the request's transaction; raises like `refuse_again`."""
        self.refuse_again(connection)
        now = time.time()
        connection.execute("DELETE FROM answers WHERE time <= ?", (now - RETENTION_S,))
        # The clock may have been ahead
        connection.execute("UPDATE answers SET time = ? WHERE time > ?", (now, now))
        row = (self.owner, self.key, self.digest, answer, now)
        connection.execute("INSERT INTO answers VALUES (?, ?, ?, ?, ?)", row)


def refuse_again(database: Database, request: Repeatable) -> None:
    with database.reading() as connection:
        request.refuse_again(connection)
