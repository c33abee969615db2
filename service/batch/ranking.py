"""From the parts of a data set to its ranking: that of /acquire for a pool of all its rows.

For a score the k best rows of each part are enough. Where copies are looked for a part has all its
rows, since which of them is the first of its copies only all can say. Memory stays bounded all the
same: rows are looked at in bins of their digests, and copies are in one bin.
"""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float64, Int64, UInt64

from model_store.acquisition.choice import candidates_of, copies_among, is_again, joint_ranking, top
from model_store.acquisition.scoring import pool_candidates
from model_store.inference.model import Model
from model_store.scores.joint import Candidates
from model_store.sources.row_file import ID
from service.api.responses import acquire_answer
from service.batch.files import Files, Stopped
from service.batch.job import OUT, Job
from service.batch.rows import Reader, Rejects
from service.batch.shard_work import (
    EXCLUDED,
    UNKNOWN_CATEGORIES,
    check_different,
    needs_all_rows,
    table,
)
from service.engine.batching import part_rows

RANKING = "ranking"  # .json, the answer of /acquire, and .parquet
BIN_ROWS = (
    1 << 22
)  # about, that are looked at together: 40 bytes each, and half as much again to sort them

Ranked = list[dict[str, Any]]


@dataclass(frozen=True, eq=False)
class Found:
    """Rows of parts, in the order of the data set."""

    place: Int64[np.ndarray, "n"]
    score: Float64[np.ndarray, "n"]
    hash: UInt64[np.ndarray, "n"]
    digest: UInt64[np.ndarray, "n 2"]

    @classmethod
    def joined(cls, parts: list["Found"]) -> "Found":
        """Return all parts' rows."""
        return cls(
            np.concatenate([part.place for part in parts]),
            np.concatenate([part.score for part in parts]),
            np.concatenate([part.hash for part in parts]),
            np.concatenate([part.digest for part in parts]),
        )

    def take(self, rows: np.ndarray) -> "Found":
        """Return some rows."""
        return Found(self.place[rows], self.score[rows], self.hash[rows], self.digest[rows])


class RankedParts:
    """The parts of a job that ranks, all of which are there."""

    def __init__(self, job: Job, out: Files, source: Files, model: Model) -> None:
        self._job, self._out, self._model = job, out, model
        self._reader = Reader(source, job.files, model)
        self.excluded = 0
        self.unknown: Counter[str] = Counter()  # categories

    def ranking(self) -> Ranked:
        """Return the k best rows as /acquire answers them.

        Raises:
            InvalidInput: if two of them have the same id.
        """
        asked = self._job.asked
        if not needs_all_rows(asked.acquisition, self._model):
            ranked = self._best()
        elif asked.acquisition in self._model.predictive.joint_scores:
            ranked = self._jointly()
        else:
            ranked = self._first_of_copies()
        check_different([row["id"] for row in ranked])
        return ranked

    def answer(self, ranked: Ranked) -> dict[str, Any]:
        """Return the answer of /acquire."""
        asked = self._job.asked
        return acquire_answer(
            self._model.manifest,
            acquisition=asked.acquisition,
            num_samples=asked.num_samples,
            seed=asked.seed,
            pool_size=self._job.rows,
            excluded=self.excluded,
            priors=asked.priors,
            race=None,
            beta=asked.beta,
            finalists=None,
            unknown_categories=dict(self.unknown),
            ranking=ranked,
        )

    def write(self, ranked: Ranked) -> None:
        """Write the ranking beside the parts."""
        columns = {
            "rank": np.array([row["rank"] for row in ranked], dtype=np.int64),
            ID: [row["id"] for row in ranked],
            "index": np.array([row["index"] for row in ranked], dtype=np.int64),
            "score": np.array([row["score"] for row in ranked], dtype=np.float64),
        }
        self._out.create(f"{RANKING}.parquet", table(columns, {}))
        self._out.create(f"{RANKING}.json", json.dumps(self.answer(ranked)).encode() + b"\n")

    def _best(self) -> Ranked:
        """Return the rows of the largest scores, ties by hash."""
        best = None
        for found in self._parts():
            best = found if best is None else Found.joined([best, found])
            best = (
                best.take(np.sort(top(best.score, best.hash, self._job.asked.k)))
                if len(best.place)
                else best
            )
        assert best is not None
        return self._ranked(
            best.take(top(best.score, best.hash, self._job.asked.k)) if len(best.place) else best
        )

    def _first_of_copies(self) -> Ranked:
        """Return the rows of the largest scores, of copies the first by hash before all others."""
        best, again = None, np.empty(0, dtype=bool)
        for found in self._bins():
            of_bin = is_again(copies_among(found.digest), found.hash)
            best = found if best is None else Found.joined([best, found])
            again = np.concatenate([again, of_bin])
            order = np.lexsort((best.place, best.hash, -best.score, again))[: self._job.asked.k]
            best, again = best.take(order), again[order]
        assert best is not None
        return self._ranked(best)

    def _jointly(self) -> Ranked:
        """Return what is chosen among the rows that gain most alone, one of each copies; they are
        read once more."""
        asked, model = self._job.asked, self._model
        most = candidates_of(asked.acquisition, model, self._job.rows, asked.k, asked.num_samples)
        best = None
        for found in self._bins():
            first = found.take(copies_among(found.digest).first)
            best = first if best is None else Found.joined([best, first])
            best = best.take(np.lexsort((best.digest[:, 1], best.digest[:, 0], -best.score))[:most])
        assert best is not None
        if not len(best.place):
            return []
        members = self._members(best)
        copies = copies_among(members.digest)
        candidates = self._candidates(members.place[copies.first])
        joint = model.predictive.joint_scores[asked.acquisition](
            candidates, asked.num_samples, asked.seed
        )
        ids = self._ids(members.place)
        rows = np.arange(len(copies.first))
        ranked = joint_ranking(
            joint, rows, copies, [ids[p] for p in members.place.tolist()], asked.k
        )
        return [
            {**row, "index": int(members.place[row["index"]]), "control": False} for row in ranked
        ]

    def _members(self, best: Found) -> Found:
        """Return all rows that are the same as these, as far as one may be chosen."""
        wanted, kept = _keys(best.digest), []
        for found in self._bins():
            found = found.take(np.isin(_keys(found.digest), wanted))
            group = copies_among(found.digest).group
            order = np.lexsort((found.hash, group))
            rank = np.arange(len(order)) - np.searchsorted(group[order], group[order])
            kept.append(found.take(order[rank < self._job.asked.k]))
        members = Found.joined(kept)
        return members.take(np.argsort(members.place))

    def _candidates(self, places: Int64[np.ndarray, "M"]) -> Candidates:
        """Return what the draws say of some rows."""
        asked, model = self._job.asked, self._model
        draws, most = (
            model.runtime.draw_set(asked.seed, asked.num_samples),
            part_rows(model, asked.num_samples),
        )
        order = np.sort(places)
        parts = []
        for shard in self._job.shards:
            here = order[
                np.searchsorted(order, shard.place) : np.searchsorted(
                    order, shard.place + shard.rows
                )
            ]
            if len(here) == 0:
                continue
            for rows in self._reader.rows(shard, Rejects()):
                x = rows.x[np.isin(rows.places, here)]
                for start in range(0, len(x), most):
                    part = x[start : start + most]
                    parts.append(
                        pool_candidates(model, part, draws, asked.acquisition, asked.priors)
                    )
        self._reader.close()
        place = np.argsort(np.argsort(places))
        return Candidates(
            np.concatenate([part.gain for part in parts])[place],
            np.concatenate([part.own for part in parts])[place],
            np.concatenate([part.said for part in parts])[place],
        )

    def _ranked(self, best: Found) -> Ranked:
        ids = self._ids(best.place)
        pairs = zip(best.place.tolist(), best.score.tolist(), strict=True)
        return [
            {"rank": rank, "index": place, "id": ids[place], "score": score, "control": False}
            for rank, (place, score) in enumerate(pairs, start=1)
        ]

    def _ids(self, places: Int64[np.ndarray, "M"]) -> dict[int, str]:
        """Return the ids of some rows, by their places."""
        found, wanted = {}, np.sort(places)
        for shard in self._job.shards:
            low, high = np.searchsorted(wanted, [shard.place, shard.place + shard.rows])
            if low < high:
                columns = self._columns(shard.number, ["place", ID])
                is_wanted = np.isin(columns["place"].to_numpy(), wanted[low:high])
                for i in np.flatnonzero(is_wanted).tolist():
                    found[columns["place"][i].as_py()] = columns[ID][i].as_py()
        return found

    def _bins(self) -> Iterator[Found]:
        """Yield all rows, those of equal digests together."""
        bins = -(-self._job.rows // BIN_ROWS)
        for number in range(bins):
            of_bin = [
                found.take(found.digest[:, 0] % np.uint64(bins) == number)
                for found in self._parts()
            ]
            yield Found.joined(of_bin)

    def _parts(self) -> Iterator[Found]:
        """Yield what each part holds."""
        self.excluded, self.unknown = 0, Counter()
        is_batch = needs_all_rows(self._job.asked.acquisition, self._model)
        names = ["place", "score", "hash", *(("digest.0", "digest.1") if is_batch else ())]
        for shard in self._job.shards:
            columns = self._columns(shard.number, names)
            self.excluded += int(columns.schema.metadata[EXCLUDED])
            self.unknown.update(json.loads(columns.schema.metadata.get(UNKNOWN_CATEGORIES, b"{}")))
            place, score, hashes, *digest = (columns[name].to_numpy() for name in names)
            none = np.zeros((len(place), 2), dtype=np.uint64)
            yield Found(place, score, hashes, np.stack(digest, axis=1) if is_batch else none)

    def _columns(self, number: int, names: list[str]) -> Any:
        """Return columns of a part."""
        import pyarrow
        import pyarrow.parquet

        content = self._out.read(self._job.part(number))
        try:
            if content is None:
                raise pyarrow.ArrowException
            return pyarrow.parquet.read_table(
                pyarrow.BufferReader(content), columns=names, use_threads=False
            )
        except pyarrow.ArrowException:
            raise Stopped(
                f"{OUT}: expected {self._job.part(number)} as it was written, got another, or none"
            ) from None


def _keys(digest: UInt64[np.ndarray, "n 2"]) -> np.ndarray:
    return np.ascontiguousarray(digest).view("V16")[:, 0]
