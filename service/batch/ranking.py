"""Merge the parts of a data set into one ranking.

Each part has its k best rows or, for a batch acquisition, all rows. Then rows are processed in bins
of their digests, which limits the memory and keeps copies together.
"""

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
from jaxtyping import Int64

from model_store.acquisition.choice import (
    Copies,
    group_copies,
    is_repetition,
    max_joint_candidates,
    ranking,
)
from model_store.acquisition.ranking import Choice, Pool, rank_pool_sync
from model_store.inference.model import Model
from model_store.scores.joint import Candidates
from model_store.sources.files import check_ids
from model_store.sources.row_file import ID
from service.batch.computation import Computation, acquire_answer
from service.batch.data_set import OUT, Plan, Reader
from service.batch.files import Files, Stopped
from service.batch.output import parquet_bytes
from service.batch.shards import EXCLUDED_KEY, UNKNOWN_KEY

RANKING = "ranking"  # .json, the answer of /acquire, and .parquet
BIN_ROWS = 1 << 22  # approximate rows per bin: 60 bytes each during sorting

Ranked = list[dict[str, Any]]


# `place` is the index in the data set.
ROW = np.dtype([("place", "i8"), ("score", "f8"), ("hash", "u8"), ("digest", "u8", (2,))])
PartRows = np.ndarray  # of `ROW`, in the order of the data set
NO_ROWS = np.empty(0, dtype=ROW)


class RankedParts:
    """The parts of a ranked data set."""

    def __init__(self, plan: Plan, out: Files, source: Files, model: Model) -> None:
        self._plan, self._out, self._model = plan, out, model
        self._computation = Computation(model, plan.request)
        self._reader = Reader(source, plan.files, self._computation)
        self.excluded = 0
        self.unknown: Counter[str] = Counter()  # categories

    def ranking(self) -> Ranked:
        """Return the k best rows in the format of /acquire.

        Raises:
            InvalidInput: if two rows have the same id.
        """
        request = self._plan.request
        is_batch = self._computation.is_batch
        is_joint = request.acquisition in self._model.predictive.joint_scores
        rows = self._candidate_rows() if is_joint else self._top_rows()
        if len(rows) == 0:
            return []
        rows = np.sort(rows, order="place")
        ids = self._ids(rows["place"])
        if is_joint:
            task = self._model.manifest.task
            choice = Choice(task, request.acquisition, request.k, request.num_samples)
            ranked = rank_pool_sync(CandidatePool(self, rows, ids, request.seed), choice).rows
        else:
            copies = group_copies(rows["digest"]) if is_batch else None
            ranked = ranking(rows["score"], ids, request.seed, request.k, copies)
        check_ids([row["id"] for row in ranked], len(ranked))
        places = rows["place"].tolist()
        return [{**row, "index": places[row["index"]], "control": False} for row in ranked]

    def answer(self, ranked: Ranked) -> dict[str, Any]:
        request, rows, unknown = self._plan.request, self._plan.rows, dict(self.unknown)
        return acquire_answer(self._model.manifest, request, ranked, rows, self.excluded, unknown)

    def write(self, ranked: Ranked) -> None:
        columns = {
            "rank": np.array([row["rank"] for row in ranked], dtype=np.int64),
            ID: [row["id"] for row in ranked],
            "index": np.array([row["index"] for row in ranked], dtype=np.int64),
            "score": np.array([row["score"] for row in ranked], dtype=np.float64),
        }
        self._out.create(f"{RANKING}.parquet", parquet_bytes(columns, {}))
        self._out.create(f"{RANKING}.json", json.dumps(self.answer(ranked)).encode() + b"\n")

    def candidates(self, places: Int64[np.ndarray, "M"]) -> Candidates:
        """Compute the candidates of a joint score."""
        order = np.sort(places)

        def parts() -> Iterator[np.ndarray]:
            for shard in self._plan.shards:
                low, high = np.searchsorted(order, [shard.place, shard.place + shard.rows])
                if low == high:
                    continue
                for rows in self._reader.rows(shard, []):
                    yield rows.x[np.isin(rows.places, order[low:high])]

        return self._computation.candidates(self._computation.batches(parts()), places)

    def _top_rows(self) -> PartRows:
        """Return the k rows with the largest scores. Ties are broken by hash.

        For a batch acquisition, repeated rows are last.
        """
        is_batch = self._computation.is_batch
        best, again = NO_ROWS, np.empty(0, dtype=bool)
        for rows in self._bins() if is_batch else self._parts():
            is_copy = np.zeros(len(rows), dtype=bool)
            if is_batch:
                is_copy = is_repetition(group_copies(rows["digest"]), rows["hash"])
            best, again = np.concatenate([best, rows]), np.concatenate([again, is_copy])
            order = np.lexsort((best["place"], best["hash"], -best["score"], again))
            order = order[: self._plan.request.k]
            best, again = best[order], again[order]
        return best

    def _candidate_rows(self) -> PartRows:
        """Return the rows with the largest gains, and up to k copies of each."""
        request = self._plan.request
        max_rows = max_joint_candidates(
            request.acquisition, self._model, self._plan.rows, request.k, request.num_samples
        )
        best = NO_ROWS
        for rows in self._bins():
            best = np.concatenate([best, rows[group_copies(rows["digest"]).first]])
            best = best[np.lexsort((*best["digest"].T[::-1], -best["score"]))[:max_rows]]
        keys, groups = _keys(best), []
        for rows in self._bins():
            rows = rows[np.isin(_keys(rows), keys)]
            group = group_copies(rows["digest"]).group
            order = np.lexsort((rows["hash"], group))
            rank = np.arange(len(order)) - np.searchsorted(group[order], group[order])
            groups.append(rows[order[rank < request.k]])
        return np.concatenate(groups)

    def _ids(self, places: Int64[np.ndarray, "M"]) -> list[str]:
        ids: list[str] = []
        for shard in self._plan.shards:
            low, high = np.searchsorted(places, [shard.place, shard.place + shard.rows])
            if low < high:
                columns = self._read_columns(shard.number, ["place", ID])
                part_places = columns["place"].to_numpy()
                order = np.argsort(part_places)
                rows = order[np.searchsorted(part_places[order], places[low:high])]
                ids += columns[ID].take(rows).to_pylist()
        return ids

    def _bins(self) -> Iterator[PartRows]:
        """Yield all rows in bins. Equal digests are in the same bin."""
        bins = np.uint64(-(-self._plan.rows // BIN_ROWS))
        for number in range(int(bins)):
            in_bin = (rows[rows["digest"][:, 0] % bins == number] for rows in self._parts())
            yield np.concatenate([*in_bin])

    def _parts(self) -> Iterator[PartRows]:
        self.excluded, self.unknown = 0, Counter()
        is_batch = self._computation.is_batch
        names, digest = ["place", "score", "hash"], ["digest.0", "digest.1"] if is_batch else []
        for shard in self._plan.shards:
            columns = self._read_columns(shard.number, [*names, *digest])
            self.excluded += int(columns.schema.metadata[EXCLUDED_KEY])
            self.unknown.update(json.loads(columns.schema.metadata.get(UNKNOWN_KEY, b"{}")))
            rows = np.zeros(columns.num_rows, dtype=ROW)
            for name in names:
                rows[name] = columns[name].to_numpy()
            for i, name in enumerate(digest):
                rows["digest"][:, i] = columns[name].to_numpy()
            yield rows

    def _read_columns(self, number: int, names: list[str]) -> Any:
        import pyarrow
        import pyarrow.parquet

        content = self._out.read(self._plan.part(number))
        try:
            if content is None:
                raise pyarrow.ArrowException
            return pyarrow.parquet.read_table(
                pyarrow.BufferReader(content), columns=names, use_threads=False
            )
        except pyarrow.ArrowException:
            part = self._plan.part(number)
            raise Stopped(
                f"{OUT}: expected a valid {part}, got a damaged or missing file"
            ) from None


class CandidatePool(Pool):
    def __init__(self, parts: RankedParts, rows: PartRows, ids: list[str], seed: int) -> None:
        self.ids, self.seed = ids, seed
        self._parts, self._rows = parts, rows

    async def copies(self) -> Copies:
        return group_copies(self._rows["digest"])

    async def candidates(self, copies: Copies) -> tuple[Int64[np.ndarray, "M"], Candidates]:
        candidates = self._parts.candidates(self._rows["place"][copies.first])
        return np.arange(len(copies.first)), candidates


def _keys(rows: PartRows) -> np.ndarray:
    return np.ascontiguousarray(rows["digest"]).view("V16")[:, 0]
