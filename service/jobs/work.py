"""The arithmetic of a job: every row of a pool under the same draws, as a request with this seed would have them.

What is computed of rows goes to the disk as it comes, and lasts from `sync` to `sync`: a job that is taken up again
goes on after the last row that lasts, and ends with the same bytes.
"""

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32, Float64, Int64, UInt64

from model_store.acquisition.choice import (
    RANDOM,
    Raced,
    Scored,
    candidates_of,
    copies_among,
    joint_ranking,
    power_ranking,
    race,
    race_stages,
    ranking,
    row_digests,
)
from model_store.acquisition.scoring import pool_candidates, pool_scores, race_scores
from model_store.conformal.false_discovery import benjamini_hochberg
from model_store.conformal.mondrian import UNKNOWN
from model_store.errors import InvalidInput
from model_store.inference.draws import SharedDraws
from model_store.inference.model import Model
from model_store.inference.prediction import Prediction, check_computed
from model_store.inference.runtime import DrawSet
from model_store.inputs.columns import unknown_categories
from model_store.scores.joint import Candidates
from model_store.state.labels import AcquiredRow, Acquisition, row_format
from service.engine.batching import part_rows
from service.engine.decision import DecisionOptions, decide
from service.engine.keeping import acquired_rows, control_said, set_aside
from service.engine.threads import at_once
from service.http.responses import about_arrays, row_arrays
from service.jobs.asked import Asked
from service.jobs.column_files import ColumnFiles, write_npz
from service.pools.files import Part, PoolFile, check_ids, open_pool, stamp_of
from service.pools.rows import numbers_of
from service.process.budget import ByteBudget, Lease

SYNC_S = 2.0  # between syncs, about
IDS_FILE = "ids.json"
GROUPS_FILE = "groups.json"
SELECTED_FILE = "selected.npz"
ANSWER_FILE = "answer.json"
TABLE_ROWS = 1 << 16  # of a row group of parquet
MOST_PIXELS = 1 << 40  # a job has time, and decodes one image after the other

Rows = Iterator[tuple[int, Float32[np.ndarray, "n I"]]]  # the first one's place in the pool, and some


class Cancelled(Exception):
    """Nobody wants the job any more."""


class Work:
    """A job's work, in its folder."""

    def __init__(
        self,
        folder: Path,
        asked: Asked,
        model: Model,
        report: Callable[[int, int], bool],
        keep: Callable[[Acquisition, list[AcquiredRow]], None],
        max_pixels: int = MOST_PIXELS,
    ) -> None:
        """Prepare.

        Args:
            report: told how many rows x draws there are to do and how many are done; says whether to go on.
            keep: keeps the rows of a ranking that is to be kept.
        """
        self.folder = folder
        self.asked = asked
        self.model = model
        self._report = report
        self._keep = keep
        self._k = asked.k
        self._max_pixels = max_pixels
        self._synced = time.monotonic()
        self._work = asked.rows * asked.num_samples
        self._done = 0
        self._lease = Lease(ByteBudget(1 << 62))  # a job is bounded by its parts
        self.pool = self._opened()

    def run(self) -> Path:
        """Do all that is left to do, and return the file that holds the answer.

        Raises:
            InvalidInput: naming a row that cannot be read or computed.
            Cancelled: if it is not to go on.
        """
        return self._predict() if self.asked.options is not None else self._acquire()

    def _opened(self) -> PoolFile:
        asked = self.asked
        path = self.folder / asked.path  # which a whole path takes the place of
        if asked.stamp is not None and (not path.exists() or stamp_of(path) != asked.stamp):
            raise InvalidInput(asked.field, "the file as it was when the job was asked for", "another, or none")
        return open_pool(path, self.model.manifest.input, asked.field)

    def _ids(self) -> list[str]:
        """Return a name for each row."""
        own = self.folder / IDS_FILE
        ids = json.loads(own.read_bytes()) if own.exists() else self.pool.ids()
        if ids is None:
            return [str(i) for i in range(self.asked.rows)]
        check_ids(ids, self.asked.rows)
        return list(ids)

    # Acquisition

    def _acquire(self) -> Path:
        asked, model = self.asked, self.model
        ids = self._ids()
        kept, control = np.arange(asked.rows), np.empty(0, dtype=np.int64)
        if asked.selected:
            with np.load(self.folder / SELECTED_FILE, allow_pickle=False) as selected:
                kept, control = selected["ranked"], selected["control"]
        self._k = asked.k - len(control)
        kept_ids = [ids[i] for i in kept.tolist()] if asked.selected else ids
        stages = race_stages(asked.race, asked.acquisition, model.manifest.task, asked.num_samples)
        finalists: int | None = None
        ranked: list[dict[str, Any]]
        if self._k == 0 or len(kept) == 0:
            ranked = []
        elif asked.acquisition == RANDOM:
            ranked = ranking(None, kept_ids, asked.seed, self._k)
        elif stages and asked.race is not None:
            raced = self._race(kept, stages, asked.race)
            finalists, ranked = raced.finalists, ranking(raced.scores, kept_ids, asked.seed, self._k)
        elif asked.acquisition in model.predictive.batches:
            ranked = self._batch(kept, kept_ids)
        else:
            scores = self._scores(kept)[0]
            ranked = ranking(scores, kept_ids, asked.seed, self._k)
        for row in ranked:
            row |= {"index": int(kept[row["index"]]), "control": False}
        ranked += set_aside(control.tolist(), ids, len(ranked))
        if asked.keep:
            self._keep_rows(ranked)
        answer = {
            "model": asked.model,
            "version": asked.version,
            "acquisition": asked.acquisition,
            "num_samples": asked.num_samples,
            "seed": asked.seed,
            "pool_size": asked.rows,
            "priors": None
            if asked.priors is None
            else dict(zip(model.manifest.classes or (), asked.priors, strict=True)),
            "race": asked.race,
            "finalists": finalists,
            "excluded": asked.excluded,
            "ranking": ranked,
        }
        return self._written(ANSWER_FILE, lambda path: path.write_text(json.dumps(answer)))

    def _race(self, kept: Int64[np.ndarray, "M"], stages: tuple[int, ...], probability: float) -> Raced:
        """Return what comes of a race, each lap of which is kept."""
        asked = self.asked
        laps = race(len(kept), self._k, stages, asked.num_samples, probability, asked.field)
        self._work, number, lap = 0, 0, next(laps)
        while True:
            self._work += len(lap.rows) * lap.num_draws
            scored = self._lap(f"lap {number}", kept[lap.rows], lap.num_draws)
            try:
                number, lap = number + 1, laps.send(scored)
            except StopIteration as ended:
                raced: Raced = ended.value
                return raced

    def _lap(self, name: str, rows: Int64[np.ndarray, "n"], num_draws: int) -> Scored:
        """Return the scores of some rows, in ascending order, under the first draws, and their standard errors."""
        asked, draws, columns = self.asked, self._draws(num_draws), ColumnFiles(self.folder / name)
        self._done += columns.rows * num_draws
        is_last = num_draws == asked.num_samples
        for _, x in self._in_runs(self._some(rows[columns.rows :]), num_draws):
            request = self.model, x, draws, asked.acquisition, asked.priors
            if is_last:
                of_rows = {"score": pool_scores(*request)}
            else:
                of_rows = dict(zip(("score", "error"), race_scores(*request), strict=True))
            check_computed(of_rows["score"], asked.field, int(rows[columns.rows]))
            columns.append(of_rows)
            self._advance(len(x) * num_draws, columns)
        columns.sync()
        found = np.array(columns.column("score")), None if is_last else np.array(columns.column("error"))
        columns.close()
        return found

    def _batch(self, kept: Int64[np.ndarray, "M"], ids: list[str]) -> list[dict[str, Any]]:
        """Return the ranking of a pool of which a batch is chosen."""
        asked, model = self.asked, self.model
        scores, digests = self._scores(kept)
        copies = copies_among(digests)
        if asked.acquisition not in model.predictive.joint_scores:
            return power_ranking(scores, copies, ids, asked.seed, self._k)
        check_computed(scores, asked.field)
        most = candidates_of(asked.acquisition, model, len(copies.first), self._k, asked.num_samples)
        assert most is not None
        rows = np.lexsort((np.arange(len(copies.first)), -scores[copies.first]))[:most]
        self._work += len(rows) * asked.num_samples
        joint = model.predictive.joint_scores[asked.acquisition](
            self._candidates(kept[copies.first[rows]]), asked.num_samples, asked.seed
        )
        return at_once(joint_ranking(joint, rows, copies, ids, self._k))

    def _keep_rows(self, ranked: list[dict[str, Any]]) -> None:
        """Keep the rows of a ranking, and what the version says of those that are set aside."""
        asked, model, draws = self.asked, self.model, self._draws(self.asked.num_samples)
        places = sorted(row["index"] for row in ranked)
        if not places:
            return
        x = np.concatenate([part for _, part in self._some(np.array(places))])
        pool = dict(zip(places, x, strict=True))
        said: list[dict[str, Any]] = []
        aside = np.array([pool[row["index"]] for row in ranked if row["control"]]).reshape(-1, x.shape[1])
        for _, part in self._in_runs(iter([(0, aside)]), asked.num_samples):
            said += control_said(model.manifest, model.prediction(*model.runtime.run_set(part, draws), None))
        spec = row_format(model.manifest)
        how = Acquisition(asked.model, asked.version, spec, asked.acquisition, asked.seed, asked.num_samples)
        self._keep(how, acquired_rows(pool, ranked, said))

    def _candidates(self, rows: Int64[np.ndarray, "C"]) -> Candidates:
        """Return what the draws say of some rows of the pool, in their order."""
        asked, draws = self.asked, self._draws(self.asked.num_samples)
        parts = []
        for _, x in self._in_runs(self._some(np.sort(rows)), asked.num_samples):
            parts.append(pool_candidates(self.model, x, draws, asked.acquisition, asked.priors))
            self._advance(len(x) * asked.num_samples)
        place = np.argsort(np.argsort(rows))
        return Candidates(
            np.concatenate([part.gain for part in parts])[place],
            np.concatenate([part.own for part in parts])[place],
            np.concatenate([part.said for part in parts])[place],
        )

    def _scores(self, rows: Int64[np.ndarray, "M"]) -> tuple[Float64[np.ndarray, "M"], UInt64[np.ndarray, "M 2"]]:
        """Return the scores of some rows, once those of all were computed, and their digests."""
        asked, draws = self.asked, self._draws(self.asked.num_samples)
        columns = ColumnFiles(self.folder / "scores")
        self._done += columns.rows * asked.num_samples
        for first, x in self._in_runs(self._all(columns.rows), asked.num_samples):
            scores = pool_scores(self.model, x, draws, asked.acquisition, asked.priors)
            check_computed(scores, asked.field, first)
            columns.append({"score": scores, "digest": row_digests(x)})
            self._advance(len(x) * asked.num_samples, columns)
        columns.sync()
        found = np.array(columns.column("score"))[rows], np.array(columns.column("digest"))[rows]
        columns.close()
        return found

    # Prediction

    def _predict(self) -> Path:
        asked, model, options = self.asked, self.model, self.asked.options
        assert options is not None
        own_ids = (self.folder / IDS_FILE).exists() or self.pool.ids() is not None
        ids = self._ids() if own_ids else None
        groups = self._groups()
        draws = self._draws(asked.num_samples)
        columns = ColumnFiles(self.folder / "columns")
        self._done = columns.rows * asked.num_samples
        inputs = model.manifest.input.columns
        unknown = columns.note.setdefault("unknown_categories", {})
        for first, x in self._in_runs(self._all(columns.rows), asked.num_samples):
            prediction = _prediction(model, x, draws, options)
            check_computed(prediction.scores.by_name()[prediction.scores.overall], asked.field, first)
            if groups is not None:
                prediction = prediction.of_groups(groups[first : first + len(x)])
            arrays = row_arrays(model.manifest, prediction, decide(prediction, options), asked.num_samples)
            columns.append(dict(arrays))
            for name, count in unknown_categories(x, inputs).items():
                unknown[name] = unknown.get(name, 0) + count
            self._advance(len(x) * asked.num_samples, columns)
        columns.sync()
        about = dict(about_arrays(model.manifest, asked.seed, options))
        if inputs:
            about["unknown_categories"] = np.array([unknown.get(column.name, 0) for column in inputs])
        of_rows = {name: columns.column(name) for name in columns.names}
        if options.fdr is not None:  # which all rows decide together
            of_rows["flag"] = benjamini_hochberg(np.array(of_rows["p_value"]), options.fdr)
        write = _write_parquet if asked.format == "parquet" else _write_npz
        answer = self._written(f"predictions.{asked.format}", lambda path: write(path, about, ids, of_rows, model))
        columns.close()
        return answer

    def _groups(self) -> Int64[np.ndarray, "N"] | None:
        """Return the number of each row's group, where the model is calibrated by group."""
        spec = self.model.manifest.categories
        if spec is None or spec.kind != "group":
            return None
        path = self.folder / GROUPS_FILE
        if not path.exists():
            return np.full(self.asked.rows, UNKNOWN)
        numbers = {name: number for number, name in enumerate(spec.names)}
        return np.array([numbers.get(group, UNKNOWN) for group in json.loads(path.read_bytes())], dtype=np.int64)

    # Rows

    def _draws(self, num_samples: int) -> DrawSet:
        return self.model.runtime.draw_set(self.asked.seed, num_samples)

    def _all(self, first: int) -> Rows:
        """Yield all rows from `first` on."""
        for part in self.pool.parts(first):
            x = self._numbers(part, first)
            yield first, x
            first += len(x)

    def _some(self, rows: Int64[np.ndarray, "M"]) -> Rows:
        """Yield some rows, given their places in ascending order."""
        if len(rows) == 0:
            return
        first = int(rows[0])
        for part in self.pool.parts(first):
            n = len(next(iter(part.values()))) if isinstance(part, dict) else len(part)
            here = rows[(rows >= first) & (rows < first + n)] - first
            if len(here):
                yield first + int(here[0]), self._numbers(part, first)[here]
            first += n
            if first > rows[-1]:
                return

    def _numbers(self, part: Part, first: int) -> Float32[np.ndarray, "n I"]:
        spec, encoder = self.model.manifest.input, self.model.text_encoder
        return at_once(numbers_of(part, spec, self.asked.field, first, self._max_pixels, self._lease, encoder))

    def _in_runs(self, rows: Rows, num_samples: int) -> Rows:
        """Yield rows as many as are computed at once."""
        most = part_rows(self.model, num_samples)
        for first, x in rows:
            for start in range(0, len(x), most):
                yield first + start, x[start : start + most]

    # Progress

    def _advance(self, row_draws: int, columns: ColumnFiles | None = None) -> None:
        """Note what was done; now and then have it last and say so.

        Raises:
            Cancelled: if the job is not to go on.
        """
        self._done += row_draws
        if time.monotonic() - self._synced < SYNC_S:
            return
        if columns is not None:
            columns.sync()
        self._synced = time.monotonic()
        if not self._report(self._work, self._done):
            raise Cancelled

    def _written(self, name: str, write: Callable[[Path], Any]) -> Path:
        """Write the answer whole, or not at all."""
        draft = self.folder / f"{name}.draft"
        write(draft)
        with draft.open("rb") as file:
            os.fsync(file.fileno())
        draft.replace(self.folder / name)
        self._report(self._work, self._work)
        return self.folder / name


def _prediction(model: Model, x: Float32[np.ndarray, "N I"], draws: DrawSet, options: DecisionOptions) -> Prediction:
    if options.rule is None:
        return model.prediction(*model.runtime.run_set(x, draws), options.priors)
    known, density = model.runtime.before_draws(x)
    rows = SharedDraws(model.runtime, known, draws)
    return model.prediction_with_stopping(rows, density, draws.num_draws, options.rule)


def _write_npz(
    path: Path, about: dict[str, np.ndarray], ids: list[str] | None, of_rows: dict[str, np.ndarray], _: Model
) -> None:
    named = {} if ids is None else {"ids": np.array(ids)}
    write_npz(path, iter({**about, **named, **of_rows}.items()))


def _write_parquet(
    path: Path, about: dict[str, np.ndarray], ids: list[str] | None, of_rows: dict[str, np.ndarray], model: Model
) -> None:
    """Write a table: what has several numbers a row becomes a column for each, such as `probabilities.cat`."""
    import pyarrow
    import pyarrow.parquet

    classes = model.manifest.classes or ()
    parts = {"interval": ("low", "high"), "probabilities": classes, "prediction_set": classes}
    rows = len(next(iter(of_rows.values())))
    metadata = {f"dubito.{name}": str(value.tolist()) for name, value in about.items()}
    writer = None
    for first in range(0, rows, TABLE_ROWS):
        here = slice(first, first + TABLE_ROWS)
        table: dict[str, Any] = {} if ids is None else {"id": ids[here]}
        for name, column in of_rows.items():
            values = np.asarray(column[here])
            if values.ndim == 1:
                table[name] = values.tolist() if values.dtype.kind == "U" else values
            else:
                table |= {f"{name}.{part}": values[:, i] for i, part in enumerate(parts[name])}
        batch = pyarrow.table(table)
        if writer is None:
            writer = pyarrow.parquet.ParquetWriter(path, batch.schema.with_metadata(metadata))
        writer.write_table(batch.replace_schema_metadata(metadata))
    if writer is not None:
        writer.close()
