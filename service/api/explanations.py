"""What made rows strange, as JSON and as arrays."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from model_store.artifacts.manifest import Manifest
from model_store.inference.explanation import Explanation
from model_store.sources.columns import OddCells

SHOWN = 100  # characters of a category that was sent
NO_COLUMNS = "the model does not take rows of columns"
NO_USUAL = "this version was published before columns had usual values: fit the model again"
NOT_OBJECTS = "rows did not come as objects keyed by column"
BY_COLUMN = "the model takes rows of columns, which have `columns` in its place"
NO_TERMS = (
    "no detector of this version's flag is divided among the numbers of a row: it was published "
    "before that was "
    "possible, its flag combines no detector of the input, its rows are too long, or an encoder "
    "comes before it"
)
OF_IDS = (
    "the model takes rows of ids, which have no size: none has a share, and no training row is near"
)
NO_ROWS = "this version was published without training rows (serving.nearest_rows of its recipe), or before there were"


@dataclass(frozen=True, eq=False)
class Explained:
    """Rows of a request explained; `cells` are None of rows that were not objects."""

    explanation: Explanation
    cells: list[OddCells] | None


def explanation_bytes(manifest: Manifest, rows: int, as_arrays: bool) -> int:
    """Return about how many bytes explanations of so many rows take while they are made and
    sent."""
    numbers = int(np.prod(manifest.input.shape))
    return rows * (2000 + numbers * (24 if as_arrays else 72))


def json_explanations(
    manifest: Manifest, explained: Explained, rows: slice
) -> list[dict[str, Any]]:
    """Return what JSON says of why some rows are strange."""
    why = null_because(manifest, explained)
    count = len(explained.explanation.flag.statistic)
    return [_json(manifest, explained, n, why) for n in range(count)[rows]]


def null_because(manifest: Manifest, explained: Explained) -> dict[str, str]:
    """Return by field why explanations do not have it."""
    explanation = explained.explanation
    why: dict[str, str] = {}
    if manifest.input.columns:
        why |= dict.fromkeys(("attributed", "map"), BY_COLUMN)
        why |= {"columns": NO_USUAL} if explanation.falls is None else {}
        why |= dict.fromkeys(("unseen", "missing"), NOT_OBJECTS) if explained.cells is None else {}
    else:
        why |= dict.fromkeys(("columns", "unseen", "missing"), NO_COLUMNS)
        no_terms = OF_IDS if manifest.input.takes_ids else NO_TERMS
        why |= dict.fromkeys(("attributed", "map"), no_terms) if explanation.shares is None else {}
    no_rows = OF_IDS if manifest.input.takes_ids and manifest.encoder is None else NO_ROWS
    return why | ({"nearest": no_rows} if explanation.nearest is None else {})


def _json(manifest: Manifest, explained: Explained, n: int, why: dict[str, str]) -> dict[str, Any]:
    explanation, cells, flag = explained.explanation, explained.cells, explained.explanation.flag
    content: dict[str, Any] = dict.fromkeys(
        ("columns", "attributed", "map", "unseen", "missing", "nearest")
    )
    if explanation.falls is not None:
        of_row = explanation.falls[n]
        order = np.argsort(-of_row, kind="stable").tolist()
        names = [column.name for column in manifest.input.columns]
        content["columns"] = [{"column": names[i], "fall": float(of_row[i])} for i in order]
    if explanation.shares is not None:
        content["attributed"] = float(explanation.shares[n].sum())
        content["map"] = explanation.shares[n].reshape(manifest.input.shape).tolist()
    if cells is not None:
        unseen = cells[n].unseen.items()
        content["unseen"] = [{"column": name, "value": value[:SHOWN]} for name, value in unseen]
        content["missing"] = cells[n].missing
    if explanation.nearest is not None:
        ids, distances = explanation.nearest[n]
        content["nearest"] = [
            {"id": name, "distance": distance}
            for name, distance in zip(ids, distances.tolist(), strict=True)
        ]
    detectors = {
        name: {"share": float(share[n]), "low": bool(flag.is_low[name][n])}
        for name, share in flag.share.items()
    }
    return {
        "statistic": float(flag.statistic[n]),
        "detectors": detectors,
        **content,
        "null_because": why,
    }


def explanation_arrays(manifest: Manifest, explained: Explained) -> dict[str, np.ndarray]:
    """Return the same as arrays, a row each, without what is null."""
    return {f"explanation.{name}": array for name, array in _arrays(manifest, explained)}


def _arrays(manifest: Manifest, explained: Explained) -> Iterator[tuple[str, np.ndarray]]:
    explanation, names = explained.explanation, [column.name for column in manifest.input.columns]
    yield "statistic", explanation.flag.statistic
    for name, share in explanation.flag.share.items():
        yield f"detectors.{name}.share", share
        yield f"detectors.{name}.low", explanation.flag.is_low[name]
    if explanation.falls is not None:
        yield "columns", explanation.falls
    if explanation.shares is not None:
        yield "attributed", explanation.shares.sum(axis=1)
        yield "map", explanation.shares.reshape(-1, *manifest.input.shape)
    if explained.cells is not None:
        yield (
            "unseen",
            np.array([[name in cells.unseen for name in names] for cells in explained.cells]),
        )
        yield (
            "missing",
            np.array([[name in cells.missing for name in names] for cells in explained.cells]),
        )
    if explanation.nearest is not None:
        yield "nearest.id", np.array([ids for ids, _ in explanation.nearest])
        yield "nearest.distance", np.array([distances for _, distances in explanation.nearest])
