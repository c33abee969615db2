"""Merge the parts of a data set, which have their k best rows each, into one ranking."""

import json
from collections import Counter
from typing import Any

import numpy as np

from model_store.acquisition.choice import ranking
from model_store.artifacts.manifest import Manifest
from model_store.sources.files import check_ids
from model_store.sources.row_file import ID
from service.batch.computation import acquire_answer
from service.batch.data_set import OUT, Plan
from service.batch.files import Files, Stopped
from service.batch.output import parquet_bytes
from service.batch.shards import EXCLUDED_KEY, UNKNOWN_KEY

RANKING = "ranking"  # .json, the answer of /acquire, and .parquet


def rank_parts(plan: Plan, out: Files, manifest: Manifest) -> dict[str, Any]:
    """Rank the k best rows of all parts. Ties are broken by hash.

    Returns:
        The answer of `/acquire`.

    Raises:
        InvalidInput: if two rows have the same id.
    """
    import pyarrow

    request, excluded, unknown = plan.request, 0, Counter[str]()
    best: Any = None
    for shard in plan.shards:
        part = _read_part(out, plan.part(shard.number))
        metadata = part.schema.metadata
        excluded += int(metadata[EXCLUDED_KEY])
        unknown.update(json.loads(metadata[UNKNOWN_KEY]))
        part = part.replace_schema_metadata()
        best = part if best is None else pyarrow.concat_tables([best, part])
        place, score, hashes = (best[name].to_numpy() for name in ("place", "score", "hash"))
        best = best.take(np.lexsort((place, hashes, -score))[: request.k])
    best = best.sort_by("place")
    ids, places = best[ID].to_pylist(), best["place"].to_pylist()
    ranked = ranking(best["score"].to_numpy(), ids, request.seed, request.k) if ids else []
    check_ids([row["id"] for row in ranked], len(ranked))
    rows = [{**row, "index": places[row["index"]], "control": False} for row in ranked]
    return acquire_answer(manifest, request, rows, plan.rows, excluded, dict(unknown))


def write_ranking(out: Files, answer: dict[str, Any]) -> None:
    ranked = answer["ranking"]
    columns = {
        "rank": np.array([row["rank"] for row in ranked], dtype=np.int64),
        ID: [row["id"] for row in ranked],
        "index": np.array([row["index"] for row in ranked], dtype=np.int64),
        "score": np.array([row["score"] for row in ranked], dtype=np.float64),
    }
    out.create(f"{RANKING}.parquet", parquet_bytes(columns, {}))
    out.create(f"{RANKING}.json", json.dumps(answer).encode() + b"\n")


def _read_part(out: Files, name: str) -> Any:
    import pyarrow
    import pyarrow.parquet

    content = out.read(name)
    try:
        if content is None:
            raise pyarrow.ArrowException
        return pyarrow.parquet.read_table(pyarrow.BufferReader(content), use_threads=False)
    except pyarrow.ArrowException:
        raise Stopped(f"{OUT}: expected a valid {name}, got a damaged or missing file") from None
