"""Storage for acquired rows and their labels."""

import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from sqlite3 import Connection, Row

import numpy as np
from jaxtyping import Bool, Float32

from model_store.artifacts.manifest import NOT_ENCODING, TOKENIZER, Manifest
from model_store.errors import Conflict, InvalidInput
from model_store.state.database import FILE, Database, as_state_errors, may_be_damaged
from model_store.types import JsonObject

MAX_ID_CHARACTERS = 256
ROW_TYPE = np.dtype("<f4")
# Copies labels to the former labels, with the time of the change and the name of its API key
RETIRE = (
    "INSERT INTO replaced SELECT model, id, label, target, key, time, ?, ?, comment FROM labels"
)


@dataclass(frozen=True, eq=False)
class Acquisition:
    model: str
    version: str
    format: str
    acquisition: str
    seed: int
    num_samples: int


@dataclass(frozen=True, eq=False)
class AcquiredRow:
    """A row that was acquired for labelling. Control rows include a `prediction`."""

    id: str
    rank: int
    score: float | None
    x: Float32[np.ndarray, "I"]
    control: bool = False
    prediction: JsonObject | None = None


@dataclass(frozen=True, eq=False)
class Label:
    """A class label or a regression target. `x` is required for rows that were not acquired."""

    id: str
    value: str | float
    x: Float32[np.ndarray, "I"] | None = None
    comment: str | None = None


@dataclass(frozen=True)
class Accepted:
    """The number of new, known and replaced labels, and the resulting total."""

    accepted: int
    known: int
    replaced: int
    labels: int


@dataclass(frozen=True, eq=False)
class LabelledRows:
    """A model's labelled rows, oldest label first."""

    ids: list[str]
    x: Float32[np.ndarray, "N I"]
    values: list[str | float]
    is_control: Bool[np.ndarray, "N"]
    have_keys: bool  # every label has an API key
    left_out: int = 0  # rows in other formats

    def digest(self) -> str:
        """Compute a SHA-256 digest of the rows and labels."""
        digest = sha256()
        for name, value, x, is_control in sorted(
            zip(self.ids, self.values, self.x, self.is_control.tolist(), strict=True),
            key=lambda row: row[0],
        ):
            digest.update(json.dumps([name, value, is_control]).encode())
            digest.update(x.tobytes())
        return digest.hexdigest()


def row_format(manifest: Manifest) -> str:
    """Compute a digest of a version's input encoding. Rows of different formats cannot be mixed."""
    exclude = {"minimum": True, "maximum": True, **NOT_ENCODING}
    spec = manifest.input.model_dump(mode="json", exclude=exclude)
    tokenizer = manifest.files[TOKENIZER].sha256 if TOKENIZER in manifest.files else None
    return sha256(json.dumps([spec, tokenizer], sort_keys=True).encode()).hexdigest()[:32]


def has_state(folder: Path | None) -> bool:
    with as_state_errors():
        return folder is not None and (folder / FILE).exists()


def check_id(name: str, field: str) -> None:
    if not 1 <= len(name) <= MAX_ID_CHARACTERS or not name.isprintable():
        raise InvalidInput(field, f"1 to {MAX_ID_CHARACTERS} printable characters", "another")


def save_acquired(
    database: Database, acquisition: Acquisition, rows: Sequence[AcquiredRow]
) -> None:
    """Save acquired rows. Labelled rows and control rows are not overwritten."""
    now = time.time()
    columns = [
        {
            **vars(acquisition),
            **vars(row),
            "prediction": None if row.prediction is None else json.dumps(row.prediction),
            "x": row.x.astype(ROW_TYPE).tobytes(),
            "time": now,
        }
        for row in rows
    ]
    with database.writing() as connection:
        connection.executemany(
            """
            DELETE FROM acquired WHERE model = :model AND id = :id AND NOT control
                AND NOT EXISTS (SELECT 1 FROM labels WHERE model = :model AND id = :id)
            """,
            columns,
        )
        connection.executemany(
            """
            INSERT INTO acquired VALUES (:model, :id, :version, :acquisition, :seed, :num_samples,
                :rank, :score, :control, :prediction, :x, :format, :time)
            ON CONFLICT DO NOTHING
            """,
            columns,
        )


def labelled_ids(database: Database, model: str, ids: Sequence[str]) -> set[str]:
    rows = database.query(
        "SELECT id FROM labels WHERE model = ? AND id IN (SELECT value FROM json_each(?))",
        (model, json.dumps(list(ids))),
    )
    return {row["id"] for row in rows}


def is_saved(database: Database, model: str, name: str) -> bool:
    rows = database.query(
        "SELECT 1 FROM acquired WHERE model = :model AND id = :id UNION "
        "SELECT 1 FROM labels WHERE model = :model AND id = :id",
        {"model": model, "id": name},
    )
    return bool(rows)


def accept(
    database: Database,
    model: str,
    row_format: str,
    labels: Sequence[Label],
    replace: bool = False,
    key: str | None = None,
) -> Accepted:
    """Store labels in one transaction, ignoring known ones. Their ids must be unique.

    Raise Conflict if a label contradicts an earlier row or label. `key` names the API key.
    """
    now, outcomes = time.time(), Counter[str]()
    with database.writing() as connection:
        for n, label in enumerate(labels):
            field = f"labels.{n}"
            outcome = _accept(connection, model, row_format, label, field, replace, key, now)
            outcomes[outcome] += 1
        query = "SELECT count(*) FROM labels WHERE model = ?"
        total = connection.execute(query, (model,)).fetchone()[0]
    return Accepted(outcomes["accepted"], outcomes["known"], outcomes["replaced"], total)


def _accept(
    connection: Connection,
    model: str,
    row_format: str,
    label: Label,
    field: str,
    replace: bool,
    key: str | None,
    now: float,
) -> str:
    place = model, label.id
    acquired = connection.execute(
        "SELECT row, format FROM acquired WHERE model = ? AND id = ?", place
    ).fetchone()
    current = connection.execute(
        "SELECT label, target, row, format FROM labels WHERE model = ? AND id = ?", place
    ).fetchone()
    row = None if label.x is None else label.x.astype(ROW_TYPE).tobytes()
    saved = acquired or current
    saved_row = saved["row"] if saved else None
    if saved_row is None and row is None:
        expected = "the id of an acquired row, or an `input`"
        raise InvalidInput(f"{field}.id", expected, "an unknown id without `input`")
    if saved_row is not None and row is not None and row != saved_row:
        if saved["format"] == row_format:
            expected = "the same row as before for this id"
            raise Conflict(f"{field}.input", expected, "another")
        table = "acquired" if acquired else "labels"
        connection.execute(
            f"UPDATE {table} SET row = ?, format = ? WHERE model = ? AND id = ?",
            (row, row_format, *place),
        )
    value = (label.value, None) if isinstance(label.value, str) else (None, label.value)
    if current is None:
        connection.execute(
            "INSERT INTO labels VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (*place, *value, None if acquired else row, row_format, key, now, label.comment),
        )
        return "accepted"
    if (current["label"], current["target"]) == value:
        connection.execute(
            "UPDATE labels SET key = coalesce(key, ?), comment = coalesce(?, comment) "
            "WHERE model = ? AND id = ?",
            (key, label.comment, *place),
        )
        return "known"
    if not replace:
        expected = 'the same label as before, or "replace": true'
        raise Conflict(field, expected, "another label")
    connection.execute(f"{RETIRE} WHERE model = ? AND id = ?", (now, key, *place))
    connection.execute(
        "UPDATE labels SET label = ?, target = ?, key = ?, time = ?, comment = ? "
        "WHERE model = ? AND id = ?",
        (*value, key, now, label.comment, *place),
    )
    return "replaced"


def counts(database: Database, model: str) -> dict[str, int]:
    """Count a model's acquired, unlabelled, labelled and labelled control rows."""
    (row,) = database.query(
        """
        SELECT (SELECT count(*) FROM acquired WHERE model = :m) acquired,
            (SELECT count(*) FROM acquired a WHERE model = :m AND NOT EXISTS
                (SELECT 1 FROM labels l WHERE l.model = a.model AND l.id = a.id)) waiting,
            (SELECT count(*) FROM labels WHERE model = :m) labels,
            (SELECT count(*) FROM labels JOIN acquired USING (model, id)
                WHERE model = :m AND control) control_labels
        """,
        {"m": model},
    )
    return dict(row)


def kept_labels(
    database: Database, model: str, key: str | None, after: int, limit: int, former: bool = False
) -> list[JsonObject]:
    """Return one page of a model's labels, in order of arrival.

    Args:
        key: only labels with this API key.
        after: the `place` of the last label on the previous page.
        former: instead return replaced and deleted labels, in the order in which they ended.
    """
    table, columns = ("replaced", ", l.ended, l.ended_by") if former else ("labels", "")
    rows = database.query(
        f"""
        SELECT l.rowid place, l.id, l.label, l.target, l.key annotator, l.time,
            coalesce(a.control, 0) control, l.comment{columns}
        FROM {table} l LEFT JOIN acquired a USING (model, id)
        WHERE model = :model AND l.rowid > :after AND (:key IS NULL OR l.key = :key)
        ORDER BY l.rowid LIMIT :limit
        """,
        {"model": model, "key": key, "after": after, "limit": limit},
    )
    return [{**dict(row), "control": bool(row["control"])} for row in rows]


def delete_labels(
    database: Database, model: str, ids: Sequence[str], key: str | None = None
) -> int:
    """Delete labels with an API key, but keep a record. Return the number of deleted labels."""
    condition = "model = ? AND id IN (SELECT value FROM json_each(?))"
    values = model, json.dumps(list(ids))
    with database.writing() as connection:
        connection.execute(f"{RETIRE} WHERE {condition}", (time.time(), key, *values))
        return connection.execute(f"DELETE FROM labels WHERE {condition}", values).rowcount


def labelled_rows(database: Database, model: str, row_format: str, size: int) -> LabelledRows:
    """Return a model's labelled rows that have a given format. Their shape is (N, `size`)."""
    labelled = database.query(
        """
        SELECT l.id, l.label, l.target, coalesce(a.row, l.row) row,
            coalesce(a.format, l.format) format, coalesce(a.control, 0) control, l.key
        FROM labels l LEFT JOIN acquired a USING (model, id)
        WHERE model = ? ORDER BY l.time, l.rowid
        """,
        (model,),
    )
    rows = [row for row in labelled if row["format"] == row_format]
    with may_be_damaged(f"a labelled row of {model}"):
        x = np.frombuffer(b"".join(row["row"] for row in rows), dtype=ROW_TYPE)
        x = x.astype(np.float32).reshape(len(rows), size)
    return LabelledRows(
        ids=[row["id"] for row in rows],
        x=x,
        values=[_value(row) for row in rows],
        is_control=np.array([bool(row["control"]) for row in rows], dtype=bool),
        have_keys=all(row["key"] is not None for row in rows),
        left_out=len(labelled) - len(rows),
    )


def control_labels(database: Database, model: str) -> list[tuple[str, JsonObject, str | float]]:
    rows = database.query(
        """
        SELECT a.version, a.prediction, l.label, l.target
        FROM acquired a JOIN labels l USING (model, id)
        WHERE model = ? AND a.control AND a.prediction IS NOT NULL
        """,
        (model,),
    )
    with may_be_damaged(f"a control row of {model}"):
        return [
            (str(int(row["version"])), json.loads(row["prediction"]), _value(row)) for row in rows
        ]


def _value(row: Row) -> str | float:
    return row["target"] if row["label"] is None else row["label"]


def save_candidate(
    database: Database,
    model: str,
    version: str,
    parent: str,
    labels: int,
    control: int,
    promoted: bool,
    outcome: JsonObject,
) -> None:
    row = (model, version, parent, labels, control, promoted, json.dumps(outcome), time.time())
    with database.writing() as connection:
        connection.execute("INSERT OR REPLACE INTO candidates VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)


def candidates(database: Database, model: str) -> list[JsonObject]:
    rows = database.query(
        """
        SELECT version, parent against, labels, control control_labels, promoted, time, outcome
        FROM candidates WHERE model = ? ORDER BY rowid DESC
        """,
        (model,),
    )
    with may_be_damaged(f"a candidate of {model}"):
        return [_candidate(row) for row in rows]


def _candidate(row: Row) -> JsonObject:
    facts = dict(row)
    outcome = json.loads(facts.pop("outcome"))
    return {**facts, "promoted": bool(facts["promoted"]), **outcome}
