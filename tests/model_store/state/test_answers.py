import time
from contextlib import closing

import pytest

from model_store.errors import InvalidInput
from model_store.state.answers import RETENTION_S, Repeatable, Repeated, check_request
from model_store.state.database import Database


@pytest.fixture
def database(tmp_path):
    with closing(Database(tmp_path / "state")) as opened:
        yield opened


@pytest.fixture
def clock(monkeypatch):
    now = [1_000_000.0]
    monkeypatch.setattr(time, "time", lambda: now[0])
    return now


def request(key, digest="d"):
    return Repeatable("me", key, digest)


def keep_answer(database, repeatable, answer):
    with database.writing() as connection:
        repeatable.save(connection, answer)


def test_an_answer_is_kept_for_a_day(database, clock):
    keep_answer(database, request("a"), b"first")
    clock[0] += RETENTION_S - 1
    with pytest.raises(Repeated) as repeated:
        check_request(database, request("a"))
    assert repeated.value.answer == b"first"
    with pytest.raises(InvalidInput, match="Idempotency-Key"):
        keep_answer(database, request("a", "another"), b"second")
    clock[0] += 2
    keep_answer(database, request("a", "another"), b"second")


def test_a_clock_that_goes_back_loses_no_answer_and_keeps_none_for_longer(database, clock):
    clock[0] += 1000 * RETENTION_S
    keep_answer(database, request("a"), b"ahead")
    clock[0] -= 1000 * RETENTION_S
    keep_answer(database, request("b"), b"right")
    for key in ("a", "b"):
        with pytest.raises(Repeated):
            keep_answer(database, request(key), b"again")
    clock[0] += RETENTION_S + 1
    keep_answer(database, request("c"), b"later")
    with database.reading() as connection:
        retained = [row["key"] for row in connection.execute("SELECT key FROM answers")]
    assert retained == ["c"]
