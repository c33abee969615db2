"""Encode responses as JSON or npz arrays."""

import io
import math
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np
import orjson
from jaxtyping import Bool
from starlette.responses import Response, StreamingResponse

from model_store.artifacts.manifest import Manifest
from model_store.inference.prediction import DecisionOptions
from model_store.scores.records import take
from model_store.scores.tasks import AnyScores
from model_store.types import Pause
from service.api.media_types import JSON
from service.api.predictions import Results

NUMBERS_AT_ONCE = 20_000  # encoded in a few milliseconds
CLASS_BYTES = 200  # per class name in npz
PART_BYTES = 512 << 10  # per ASGI message


def response(
    parts: Sequence[bytes], media_type: str, headers: dict[str, str] | None = None
) -> Response:
    if len(parts) == 1 and len(parts[0]) <= PART_BYTES:
        return Response(parts[0], media_type=media_type, headers=headers)
    headers = {"content-length": str(sum(map(len, parts))), **(headers or {})}
    return StreamingResponse(_split(parts), media_type=media_type, headers=headers)


async def _split(parts: Sequence[bytes]) -> AsyncIterator[memoryview]:
    for part in parts:
        view = memoryview(part)
        for start in range(0, len(view), PART_BYTES):
            yield view[start : start + PART_BYTES]


def format_timestamp(seconds: float | None) -> str | None:
    """Format seconds since 1970 as UTC (RFC 3339)."""
    if seconds is None:
        return None
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


def json_response(content: Any, status: int = 200) -> Response:
    body = orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)
    return Response(body, status, media_type=JSON)


@dataclass(frozen=True, eq=False)
class Answer:
    results: Results
    rows: slice
    seed: int
    options: DecisionOptions
    unknown: dict[str, int]  # number of unknown categories by column

    def __len__(self) -> int:
        return len(self.flags)

    @property
    def flags(self) -> Bool[np.ndarray, "N"]:
        return self.results.decision.flag[self.rows]

    @property
    def scores(self) -> AnyScores:
        return take(self.results.scores, self.rows)

    def arrays(self) -> dict[str, np.ndarray]:
        return {name: array[self.rows] for name, array in self.results.arrays.items()}


def predict_json(answer: Answer, pause: Pause) -> list[bytes]:
    """Encode a response as JSON, in parts. No step blocks other threads for long."""
    results, manifest = answer.results, answer.results.manifest
    head = {
        "model": manifest.name,
        "version": manifest.version,
        "num_samples": results.num_samples,
        "seed": answer.seed,
        **get_rates(answer.options),
        "priors": priors_by_class(manifest, answer.options.priors),
        "unknown_categories": answer.unknown,
    }
    at_once = max(1, NUMBERS_AT_ONCE // numbers_per_row(results))
    if len(answer) <= at_once:
        return [orjson.dumps({**head, "predictions": results.objects[answer.rows]})]
    parts = [orjson.dumps({**head, "predictions": []}).removesuffix(b"]}")]
    for first in range(0, len(answer), at_once):
        step_results = results.take(slice(first, first + at_once))
        parts.append((b"," if first else b"") + orjson.dumps(step_results.objects)[1:-1])
        pause()
    return [*parts, b"]}"]


def predict_npz(answer: Answer, pause: Pause) -> list[bytes]:
    """Encode a response as npz arrays.

    The names are, for example, `probabilities` and `standard_error.bald`.

    Fields that are null in all rows are omitted. Infinite bounds remain infinite.
    """
    manifest = answer.results.manifest
    arrays = metadata_arrays(manifest, answer.seed, answer.options)
    if manifest.input.columns:
        counts = [answer.unknown.get(column.name, 0) for column in manifest.input.columns]
        arrays["unknown_categories"] = np.array(counts)
    arrays |= answer.arrays()
    pause()
    packed = io.BytesIO()
    np.savez(packed, allow_pickle=False, **arrays)
    return [packed.getvalue()]


def numbers_per_row(results: Results) -> int:
    manifest, samples = results.manifest, results.samples
    numbers = 20 + manifest.output_size * (2 if samples is None else 2 + len(samples))
    return numbers + (0 if results.explanation is None else math.prod(manifest.input.shape))


def answer_bytes(manifest: Manifest, rows: int, kept_draws: int, as_arrays: bool) -> int:
    """Estimate the memory needed by a response with `kept_draws` samples per row."""
    outputs = manifest.output_size
    if as_arrays:
        return CLASS_BYTES * outputs + rows * (400 + outputs * (32 + 8 * kept_draws))
    return rows * (1500 + outputs * (48 + 24 * kept_draws))


def priors_by_class(
    manifest: Manifest, priors: tuple[float, ...] | None
) -> dict[str, float] | None:
    return None if priors is None else dict(zip(manifest.classes or (), priors, strict=True))


def get_rates(options: DecisionOptions) -> dict[str, float | None]:
    names = ("fpr", "fdr", "coverage", "confidence", "risk")
    return {name: getattr(options, name) for name in names}


def metadata_arrays(
    manifest: Manifest, seed: int, options: DecisionOptions
) -> dict[str, np.ndarray]:
    values = {
        "model": manifest.name,
        "version": manifest.version,
        "seed": seed,
        **get_rates(options),
        "priors": options.priors,
        "classes": manifest.classes,
        "columns": tuple(column.name for column in manifest.input.columns) or None,
    }
    return {name: np.array(value) for name, value in values.items() if value is not None}
