import random
import subprocess
import sys
from contextlib import closing

import numpy as np
import pytest

from model_store.errors import Conflict, InvalidInput, NoSpace
from model_store.state.database import Database
from model_store.state.labels import (
    AcquiredRow,
    Acquisition,
    Label,
    accept,
    candidates,
    counts,
    delete_labels,
    kept_labels,
    labelled_ids,
    labelled_rows,
    save_acquired,
    save_candidate,
)
from tests.support.environment import ROOT

ROW = np.arange(3, dtype=np.float32)
RANKING = Acquisition("m", "1", "f", "bald", 7, 100)


@pytest.fixture
def database(tmp_path):
    with closing(Database(tmp_path / "state")) as database:
        yield database


def values(database):
    rows = labelled_rows(database, "m", "f", 3)
    return dict(zip(rows.ids, rows.values, strict=True))


def test_invalid_label_rejects_its_entire_request(database):
    save_acquired(
        database, RANKING, [AcquiredRow("a", 1, 0.5, ROW), AcquiredRow("b", 2, 0.4, ROW + 1)]
    )
    accept(database, "m", "f", [Label("a", "yes")])
    for bad, error in (
        (Label("unknown", "no"), InvalidInput),
        (Label("a", "no"), Conflict),
        (Label("a", "yes", ROW + 9), Conflict),
    ):
        with pytest.raises(error, match=r"^labels\.1"):
            accept(database, "m", "f", [Label("b", "no"), bad])
    assert values(database) == {"a": "yes"}
    assert labelled_ids(database, "m", ["a", "b", "c"]) == {"a"}
    assert counts(database, "m") == {"acquired": 2, "waiting": 1, "labels": 1, "control_labels": 0}
    assert counts(database, "other") == dict.fromkeys(counts(database, "m"), 0)


def test_row_is_saved_again_if_the_format_changes(database):
    save_acquired(database, RANKING, [AcquiredRow("a", 1, 0.5, ROW)])
    accept(database, "m", "f", [Label("a", "yes"), Label("b", "no", ROW)])
    labels = [Label("a", "yes", ROW + 1), Label("b", "no", ROW + 2)]
    assert accept(database, "m", "new", labels).known == 2
    rows = labelled_rows(database, "m", "new", 3)
    assert dict(zip(rows.ids, rows.x[:, 0].tolist(), strict=True)) == {"a": 1.0, "b": 2.0}
    assert labelled_rows(database, "m", "f", 3).ids == []
    with pytest.raises(Conflict, match=r"^labels\.0\.input: expected the same row"):
        accept(database, "m", "new", [Label("b", "no", ROW)])


def test_labels_are_listed_by_key_and_deleted_labels_as_former(database):
    for n, key in enumerate(("anna", "ben", "anna", None)):
        accept(database, "m", "f", [Label(f"r{n}", "yes", ROW + n)], key=key)
    actual = kept_labels(database, "m", None, 0, 10)
    assert [(label["id"], label["annotator"]) for label in actual] == [
        ("r0", "anna"),
        ("r1", "ben"),
        ("r2", "anna"),
        ("r3", None),
    ]
    (last,) = kept_labels(database, "m", "anna", actual[0]["place"], 1)
    assert last == actual[2]
    assert delete_labels(database, "m", ["r1", "r2", "unknown"], "carl") == 2
    assert [label["id"] for label in kept_labels(database, "m", None, 0, 10)] == ["r0", "r3"]
    former = kept_labels(database, "m", None, 0, 10, former=True)
    assert [(label["id"], label["annotator"], label["ended_by"]) for label in former] == [
        ("r1", "ben", "carl"),
        ("r2", "anna", "carl"),
    ]


def test_full_disk_rolls_back_all_labels_of_a_request(database):
    accept(database, "m", "f", [Label("first", 1.5, ROW)])
    with database.writing() as connection:
        pages = connection.execute("PRAGMA page_count").fetchone()[0]
        connection.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(NoSpace):
        accept(database, "m", "f", [Label(f"l{i}", 1.0, ROW) for i in range(5000)])
    assert values(database) == {"first": 1.5}


def test_replaced_labels_are_stored_and_confirmation_sets_the_key(
    database,
):
    accept(database, "m", "f", [Label("a", "yes", ROW, "blurred")])
    assert not labelled_rows(database, "m", "f", 3).have_keys
    assert accept(database, "m", "f", [Label("a", "yes", ROW)], key="team").known == 1
    assert labelled_rows(database, "m", "f", 3).have_keys
    assert accept(database, "m", "f", [Label("a", "no")], replace=True, key="team").replaced == 1
    with database.reading() as connection:
        (row,) = connection.execute("SELECT * FROM replaced")
    assert (*tuple(row)[:5], row["comment"]) == ("m", "a", "yes", None, "team", "blurred")
    assert values(database) == {"a": "no"}


def test_control_and_labelled_rows_are_not_overwritten(database):
    save_acquired(
        database, RANKING, [AcquiredRow("c", 1, None, ROW, control=True, prediction={"mean": 1.0})]
    )
    save_acquired(
        database, RANKING, [AcquiredRow("c", 1, 0.9, ROW + 1), AcquiredRow("a", 2, 0.8, ROW)]
    )
    accept(database, "m", "f", [Label("c", 1.0), Label("a", 2.0), Label("own", 3.0, ROW)])
    save_acquired(database, RANKING, [AcquiredRow("a", 1, 0.7, ROW + 5)])
    rows = labelled_rows(database, "m", "f", 3)
    by_id = {name: i for i, name in enumerate(rows.ids)}
    assert rows.is_control[by_id["c"]] and not rows.is_control[by_id["a"]]
    np.testing.assert_array_equal(rows.x[[by_id["c"], by_id["a"], by_id["own"]]], [ROW, ROW, ROW])
    assert labelled_rows(database, "m", "another format", 3).left_out == 3
    assert rows.digest() == labelled_rows(database, "m", "f", 3).digest()
    accept(database, "m", "f", [Label("a", 2.5)], replace=True)
    assert rows.digest() != labelled_rows(database, "m", "f", 3).digest()


def test_latest_outcome_of_each_candidate_is_stored(database):
    outcome = {"reason": "no worse", "control": None}
    save_candidate(database, "m", "2", "1", 10, 5, False, outcome)
    save_candidate(database, "m", "3", "1", 12, 5, True, outcome)
    save_candidate(database, "m", "2", "1", 10, 5, True, outcome)
    assert {(row["version"], row["promoted"]) for row in candidates(database, "m")} == {
        ("2", True),
        ("3", True),
    }
    assert candidates(database, "other") == []


WRITER = """
import sys
from pathlib import Path
import numpy as np
from model_store.state.database import Database
from model_store.state.labels import Label, accept
database = Database(Path(sys.argv[1]))
for batch in range(int(sys.argv[2]), 10**9):
    labels = [Label(f"{batch}-{i}", str(batch), np.zeros(3, dtype=np.float32)) for i in range(20)]
    accept(database, "m", "f", labels)
    print(batch, flush=True)
"""


def test_killed_writer_keeps_accepted_labels_and_no_partial_requests(database, tmp_path):
    accepted, first = [], 0
    for _ in range(2):
        command = [sys.executable, "-c", WRITER, str(tmp_path / "state"), str(first)]
        writer = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        accepted += [
            int(writer.stdout.readline()) for _ in range(random.SystemRandom().randrange(1, 40))
        ]
        writer.kill()
        accepted += [
            int(line)
            for line in writer.communicate()[0].splitlines(keepends=True)
            if line.endswith("\n")
        ]
        actual = values(database)
        for batch in accepted:
            assert [actual[f"{batch}-{i}"] for i in range(20)] == [str(batch)] * 20
        unanswered = max(accepted) + 1
        assert len(actual) - 20 * len(accepted) in (0, 20)
        assert sum(value == str(unanswered) for value in actual.values()) in (0, 20)
        first = unanswered  # a client resends requests without an answer
    assert len(values(database)) <= 20 * (len(accepted) + 1)
