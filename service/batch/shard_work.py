"""What is done with one shard: its rows are read, computed under the draws of the job's seed, and a
part is written.

Rows do not depend on their company and all shards have the same draws, so a part is the same bytes
whoever writes it and however often. It is created only if there is none; its rejects are written
before it, so a part that is there is done.
"""

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from model_store.acquisition.choice import (
    RANDOM,
    id_hashes,
    power_scores,
    random_scores,
    row_digests,
    top,
)
from model_store.acquisition.scoring import pool_scores
from model_store.artifacts.manifest import Manifest
from model_store.artifacts.place import open_store
from model_store.artifacts.signature import read_public_key
from model_store.artifacts.store import ModelStore
from model_store.conformal.mondrian import UNKNOWN
from model_store.errors import DubitoError, InvalidInput
from model_store.inference.model import NEEDED, Model
from model_store.sources.columns import count_unknown
from model_store.sources.row_file import ID, IDS
from service.api.responses import about_arrays, row_arrays
from service.batch.files import files_at
from service.batch.job import JOB, OUT, SOURCE, Job, Shard
from service.batch.predict_work import prediction_of
from service.batch.rows import Reader, Rejects, Rows
from service.batch.table import table_columns, table_metadata
from service.engine.batching import part_rows
from service.engine.decision import decide
from service.settings import VERIFY_KEY_VARIABLE, Settings

EXCLUDED = b"dubito.excluded"  # in a part's metadata: how many of its rows were left out
UNKNOWN_CATEGORIES = (
    b"dubito.unknown_categories"  # and how many have a category that the model does not tell apart
)
NOT_COMPUTED = (
    "expected numbers that the model can compute with, got some whose result is not finite"
)
REASONS = 3  # of rejects, that are passed on

Report = Callable[[int], None]


@dataclass(frozen=True)
class Told:
    """What a worker needs to know, wherever it is."""

    source: str
    out: str
    store: str
    cache: str
    cache_bytes: int
    verify_key_file: str | None
    exclude: tuple[str, ...] = ()

    def to_json(self) -> str:
        """Return it as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def of_json(cls, text: str) -> "Told":
        """Return what `to_json` made."""
        content = json.loads(text)
        return cls(**{**content, "exclude": tuple(content["exclude"])})


@dataclass(frozen=True)
class Said:
    """What a worker says of a shard. An `error` that `may_pass` is worth another try."""

    shard: int
    rejected: int = 0
    reasons: tuple[str, ...] = ()
    row_draws: int = 0
    cpu_s: float = 0.0
    error: str | None = None
    may_pass: bool = False


def store_of(settings: Settings) -> ModelStore:
    """Return the store that the settings name."""
    file = settings.verify_key_file
    trusted = None if file is None else read_public_key(file, VERIFY_KEY_VARIABLE)
    return open_store(settings.store, trusted, settings.cache, settings.cache_bytes)


def digest_of(manifest: Manifest) -> str:
    """Return the SHA-256 of what a version is."""
    return hashlib.sha256(manifest.model_dump_json().encode()).hexdigest()


def needs_all_rows(acquisition: str, model: Model) -> bool:
    """Whether an acquisition looks for copies among all rows, so that parts hold all of them."""
    return acquisition in model.predictive.batches


class Worker:
    """Does shards, one after the other. The model is loaded with the first."""

    def __init__(self, told: Told, threads: int) -> None:
        """Prepare; `threads` are those of the model's arithmetic."""
        self._told, self._threads = told, threads
        self._ready: _Ready | None = None

    def answered(self, number: int, report: Report) -> Said:
        """Do a shard, and say what came of it; `report` is told how many of its rows are done.

        No error is raised, but for want of memory.
        """
        try:
            self._ready = self._ready or _Ready(self._told, self._threads)
            return self._ready.done(number, report)
        except InvalidInput as error:
            return Said(number, error=str(error))
        except (DubitoError, OSError) as error:
            return Said(number, error=str(error), may_pass=True)
        except Exception as error:
            return Said(
                number, error=f"part {number}: {type(error).__name__}: {error}"[:500], may_pass=True
            )


class _Ready:
    """A worker with its model."""

    def __init__(self, told: Told, threads: int) -> None:
        out = files_at(told.out, OUT)
        content = out.read(JOB)
        if content is None:
            raise InvalidInput(OUT, "a place that every worker sees", "one without the job")
        self.out, self.job = out, Job.of_bytes(content)
        asked = self.job.asked
        trusted = None
        if told.verify_key_file is not None:
            trusted = read_public_key(Path(told.verify_key_file), VERIFY_KEY_VARIABLE)
        store = open_store(told.store, trusted, Path(told.cache), told.cache_bytes)
        self.model = Model.load(store.open(asked.model, asked.version, wanted=NEEDED), threads)
        if digest_of(self.model.manifest) != asked.manifest:
            raise InvalidInput(
                "DUBITO_STORE", f"the {asked.model} version {asked.version} of the job", "another"
            )
        self.draws = self.model.runtime.draw_set(asked.seed, asked.num_samples)
        self.reader = Reader(files_at(told.source, SOURCE), self.job.files, self.model)
        self.exclude = frozenset(told.exclude)

    def done(self, number: int, report: Report) -> Said:
        """Do a shard."""
        shard, begun = self.job.shards[number], time.process_time()
        made = self._scored if self.job.asked.kind == "score" else self._acquired
        rejects = Rejects()
        content, row_draws = made(shard, rejects, report)
        if rejects.lines:
            self.out.create(self.job.rejects(number), b"".join(rejects.lines))
        self.out.create(self.job.part(number), content)
        reasons = tuple(json.loads(line)["reason"] for line in rejects.lines[:REASONS])
        return Said(number, len(rejects.lines), reasons, row_draws, time.process_time() - begun)

    def _runs(
        self,
        shard: Shard,
        rejects: Rejects,
        report: Report,
        wanted: Callable[[str], bool] | None = None,
    ) -> Iterator[Rows]:
        """Yield a shard's rows, as many as are computed at once."""
        most, done = part_rows(self.model, self.job.asked.num_samples), 0
        for rows in self.reader.rows(shard, rejects, wanted):
            for start in range(0, len(rows.x), most):
                here = slice(start, start + most)
                yield Rows(rows.places[here], rows.ids[here], rows.x[here])
                done += len(rows.x[here])
                report(done)

    def _scored(self, shard: Shard, rejects: Rejects, report: Report) -> tuple[bytes, int]:
        """Return a table of predictions, and how many draws of rows were taken."""
        asked, model, manifest = self.job.asked, self.model, self.model.manifest
        ids: list[str] = []
        parts: list[dict[str, np.ndarray]] = []
        unknown: dict[str, int] = {}
        row_draws = 0
        for rows in self._runs(shard, rejects, report):
            arrays, computed = self._predicted(rows.x)
            row_draws += int(arrays["num_samples"].sum())
            if not computed.all():
                for i in np.flatnonzero(~computed):
                    rejects.add(int(rows.places[i]), rows.ids[i], NOT_COMPUTED)
                rows = rows.take(computed)
                arrays = {name: array[computed] for name, array in arrays.items()}
            ids += rows.ids
            parts.append(arrays)
            count_unknown(unknown, rows.x, manifest.input.columns)
        if not parts:  # for the columns
            arrays, _ = self._predicted(np.zeros((1, model.row_size), dtype=np.float32))
            parts = [{name: array[:0] for name, array in arrays.items()}]
        assert asked.options is not None
        about = dict(about_arrays(manifest, asked.seed, asked.options))
        if manifest.input.columns:
            about["unknown_categories"] = np.array(
                [unknown.get(c.name, 0) for c in manifest.input.columns]
            )
        of_rows = ((name, np.concatenate([part[name] for part in parts])) for name in parts[0])
        return table(
            {ID: ids, **table_columns(manifest, of_rows)}, table_metadata(about)
        ), row_draws

    def _predicted(self, x: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Return what is said of rows, and which of them were computed."""
        asked, model = self.job.asked, self.model
        assert asked.options is not None
        prediction = prediction_of(model, x, self.draws, asked.options)
        computed = np.isfinite(prediction.scores.by_name()[prediction.scores.overall])
        categories = model.manifest.categories
        if categories is not None and categories.kind == "group":  # which nobody said
            prediction = prediction.of_groups(np.full(len(x), UNKNOWN))
        decision = decide(prediction, asked.options)
        return dict(row_arrays(model.manifest, prediction, decision, asked.num_samples)), computed

    def _acquired(self, shard: Shard, rejects: Rejects, report: Report) -> tuple[bytes, int]:
        """Return the rows that may be ranked: the k best, or all where copies are looked for among
        them."""
        asked, model = self.job.asked, self.model
        excluded = 0

        def wanted(name: str) -> bool:
            nonlocal excluded
            excluded += name in self.exclude
            return name not in self.exclude

        is_random, is_batch = asked.acquisition == RANDOM, needs_all_rows(asked.acquisition, model)
        is_power = is_batch and asked.acquisition not in model.predictive.joint_scores
        places, scores = [np.empty(0, dtype=np.int64)], [np.empty(0)]
        digests = [np.empty((0, 2), dtype=np.uint64)]
        ids: list[str] = []
        unknown: dict[str, int] = {}
        for rows in self._runs(shard, rejects, report, wanted):
            if is_random:
                found = random_scores(id_hashes(rows.ids, asked.seed))
            else:
                found = pool_scores(model, rows.x, self.draws, asked.acquisition, asked.priors)
                count_unknown(unknown, rows.x[np.isfinite(found)], model.manifest.input.columns)
            computed = np.isfinite(found)
            if not computed.all():
                for i in np.flatnonzero(~computed):
                    rejects.add(int(rows.places[i]), rows.ids[i], NOT_COMPUTED)
                rows, found = rows.take(computed), found[computed]
            places.append(rows.places)
            scores.append(
                power_scores(found, rows.ids, asked.seed, asked.beta) if is_power else found
            )
            ids += rows.ids
            if is_batch:
                digests.append(row_digests(rows.x))
        check_different(ids)
        place, score, hashes = (
            np.concatenate(places),
            np.concatenate(scores),
            id_hashes(ids, asked.seed),
        )
        kept = np.arange(len(ids))
        if not is_batch and len(ids):
            kept = top(score, hashes, asked.k)
        columns = {
            "place": place[kept],
            ID: [ids[i] for i in kept.tolist()],
            "score": score[kept],
            "hash": hashes[kept],
        }
        if is_batch:
            digest = np.concatenate(digests)
            columns |= {"digest.0": digest[:, 0], "digest.1": digest[:, 1]}
        said = {EXCLUDED.decode(): str(excluded), UNKNOWN_CATEGORIES.decode(): json.dumps(unknown)}
        content = table(columns, said)
        return content, 0 if is_random else len(ids) * asked.num_samples


def table(columns: Mapping[str, Any], metadata: Mapping[str, str]) -> bytes:
    """Return a Parquet file, the same bytes for the same columns."""
    import pyarrow
    import pyarrow.parquet

    arrays = {
        name: pyarrow.array(column, pyarrow.string())
        if isinstance(column, list)
        else pyarrow.array(column)
        for name, column in columns.items()
    }
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(
        pyarrow.table(arrays).replace_schema_metadata(dict(metadata)),
        sink,
        compression="snappy",
        version="2.6",
    )
    return sink.getvalue().to_pybytes()


def check_different(ids: Sequence[str]) -> None:
    """Raise InvalidInput if two rows have the same id: which of them a label is of could not be
    said."""
    if len(set(ids)) < len(ids):
        again = Counter(ids).most_common(1)[0][0]
        raise InvalidInput(
            IDS, "different names", f"some that are the same, {again[:80]!r} among them"
        )
