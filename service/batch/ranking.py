"""Merge the parts of a data set, which have their k best rows each, into one ranking."""

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
from jaxtyping import Int64

from model_store.acquisition.choice import ranking
from model_store.inference.model import Model
from model_store.sources.files import check_ids
from model_store.sources.row_file import ID
from service.batch.computation import acquire_answer
from service.batch.data_set import OUT, Plan
from service.batch.files import Files, Stopped
from service.batch.output import parquet_bytes
from service.batch.shards import EXCLUDED_KEY, UNKNOWN_KEY

RANKING = "ranking"  # .json, the answer of /acquire, and .parquet

Ranked = list[dict[str, Any]]


# `place` is the index in the data set.
ROW = np.dtype([("place", "i8"), ("score", "f8"), ("hash", "u8")])
PartRows = np.ndarray  # of `ROW`, in the order of the data set
NO_ROWS = np.empty(0, dtype=ROW)


class RankedParts:
    """The parts of a ranked data set."""

    def __init__(self, plan: Plan, out: Files, model: Model) -> None:
        self._plan, self._out, self._manifest = plan, out, model.manifest
        self.excluded = 0
        self.unknown: Counter[str] = Counter()  # categories

    def ranking(self) -> Ranked:
        """Return the k best rows in the format that /acquire uses.

        Raises:
            InvalidInput: if two rows have the same id.
        """
        request = self._plan.request
        rows = self._top_rows()
        if len(rows) == 0:
            return []
        rows = np.sort(rows, order="place")
        ids = self._ids(rows["place"])
        ranked = ranking(rows["score"], ids, request.seed, request.k)
        check_ids([row["id"] for row in ranked], len(ranked))
        places = rows["place"].tolist()
        return [{**row, "index": places[row["index"]], "control": False} for row in ranked]

    def answer(self, ranked: Ranked) -> dict[str, Any]:
        request, rows, unknown = self._plan.request, self._plan.rows, dict(self.unknown)
        return acquire_answer(self._manifest, request, ranked, rows, self.excluded, unknown)

    def write(self, ranked: Ranked) -> None:
        columns = {
            "rank": np.array([row["rank"] for row in ranked], dtype=np.int64),
            ID: [row["id"] for row in ranked],
            "index": np.array([row["index"] for row in ranked], dtype=np.int64),
            "score": np.array([row["score"] for row in ranked], dtype=np.float64),
        }
        self._out.create(f"{RANKING}.parquet", parquet_bytes(columns, {}))
        self._out.create(f"{RANKING}.json", json.dumps(self.answer(ranked)).encode() + b"\n")

    def _top_rows(self) -> PartRows:
        """Return the k rows with the largest scores. Ties are broken by hash."""
        best = NO_ROWS
        for rows in self._parts():
            best = np.concatenate([best, rows])
            order = np.lexsort((best["place"], best["hash"], -best["score"]))
            best = best[order[: self._plan.request.k]]
        return best

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

    def _parts(self) -> Iterator[PartRows]:
        self.excluded, self.unknown = 0, Counter()
        names = list(ROW.names or ())
        for shard in self._plan.shards:
            columns = self._read_columns(shard.number, names)
            self.excluded += int(columns.schema.metadata[EXCLUDED_KEY])
            self.unknown.update(json.loads(columns.schema.metadata.get(UNKNOWN_KEY, b"{}")))
            rows = np.zeros(columns.num_rows, dtype=ROW)
            for name in names:
                rows[name] = columns[name].to_numpy()
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
