"""Answers to requests that came with an Idempotency-Key: the same request again gets the same
answer, for a day."""

import sqlite3
import time
from dataclasses import dataclass

from model_store.errors import InvalidInput
from model_store.state.database import Database

KEPT_S = 86_400.0
SAME = "one that no other request came with within a day"


class Repeated(Exception):
    """The request has been answered before."""

    def __init__(self, answer: bytes) -> None:
        super().__init__()
        self.answer = answer


@dataclass(frozen=True)
class Repeatable:
    """A request that may come again: who asks, under which key, and the digest of all it says."""

    owner: str
    key: str
    digest: str

    def refuse_again(self, connection: sqlite3.Connection) -> None:
        """Raise Repeated if this request was answered, InvalidInput if another with its key was."""
        row = connection.execute(
            "SELECT digest, answer FROM answers WHERE owner = ? AND key = ? AND time > ?",
            (self.owner, self.key, time.time() - KEPT_S),
        ).fetchone()
        if row is not None and row["digest"] != self.digest:
            raise InvalidInput("Idempotency-Key", SAME, "one of another request")
        if row is not None:
            raise Repeated(row["answer"])

    def keep(self, connection: sqlite3.Connection, answer: bytes) -> None:
        """Keep the answer, in the transaction in which the request is carried out; raises as
        `refuse_again` does, if it came twice at a time."""
        self.refuse_again(connection)
        now = time.time()
        connection.execute("DELETE FROM answers WHERE time <= ?", (now - KEPT_S,))
        # where the clock was ahead they would be kept for longer, perhaps for years
        connection.execute("UPDATE answers SET time = ? WHERE time > ?", (now, now))
        row = (self.owner, self.key, self.digest, answer, now)
        connection.execute("INSERT INTO answers VALUES (?, ?, ?, ?, ?)", row)


def refuse_again(database: Database, asked: Repeatable) -> None:
    with database.reading() as connection:
        asked.refuse_again(connection)
