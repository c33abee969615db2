"""Responses to requests with an Idempotency-Key, which are stored for a day."""

import sqlite3
import time
from dataclasses import dataclass

from model_store.errors import InvalidInput
from model_store.state.database import Database

RETENTION_S = 86_400.0
UNUSED = "a key that no other request used within a day"


class Repeated(Exception):
    """Raised if a request was already handled."""

    def __init__(self, answer: bytes) -> None:
        super().__init__()
        self.answer = answer


@dataclass(frozen=True)
class Repeatable:
    """The owner, idempotency key and content digest of a request."""

    owner: str
    key: str
    digest: str

    def check(self, connection: sqlite3.Connection) -> None:
        """Check that a request has not been handled before.

        Raises:
            Repeated: if it was already handled.
            InvalidInput: if another request used the same key.
        """
        row = connection.execute(
            "SELECT digest, answer FROM answers WHERE owner = ? AND key = ? AND time > ?",
            (self.owner, self.key, time.time() - RETENTION_S),
        ).fetchone()
        if row is not None and row["digest"] != self.digest:
            raise InvalidInput("Idempotency-Key", UNUSED, "the key of another request")
        if row is not None:
            raise Repeated(row["answer"])

    def save(self, connection: sqlite3.Connection, answer: bytes) -> None:
        """Save the response to a request. Raises the same exceptions as `check`."""
        self.check(connection)
        now = time.time()
        connection.execute("DELETE FROM answers WHERE time <= ?", (now - RETENTION_S,))
        # If the clock was set back, entries must still expire
        connection.execute("UPDATE answers SET time = ? WHERE time > ?", (now, now))
        row = (self.owner, self.key, self.digest, answer, now)
        connection.execute("INSERT INTO answers VALUES (?, ?, ?, ?, ?)", row)


def check_request(database: Database, request: Repeatable) -> None:
    with database.reading() as connection:
        request.check(connection)
