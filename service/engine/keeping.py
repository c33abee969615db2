"""What becomes of a pool beside its ranking: rows that are labelled are left out, some are set
aside, some kept."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float32

from model_store.artifacts.manifest import Manifest
from model_store.conformal.mondrian import UNKNOWN
from model_store.errors import InvalidInput
from model_store.inference.prediction import Prediction
from model_store.state.labels import AcquiredRow, checked_id
from model_store.state.live import said_of


def check_keeping(keep: bool, control: float, ids: Sequence[str], are_named: bool) -> None:
    """Raise InvalidInput if rows are to be kept that cannot be, or a share `control` set aside and
    not kept."""
    if control and not keep:
        expected = "0 unless `keep` is true, since labels of control rows judge the model"
        raise InvalidInput("control", expected, "a share")
    if not keep:
        return
    if not are_named:
        raise InvalidInput("ids", "names of the rows, which `keep` needs", "none")
    for n, name in enumerate(ids):
        checked_id(name, f"ids.{n}")


def control_said(manifest: Manifest, prediction: Prediction) -> list[dict[str, Any]]:
    """Return what is kept of the predictions of rows that are set aside."""
    if manifest.categories is not None and manifest.categories.kind == "group":  # which nobody said
        prediction = prediction.of_groups(np.full(len(prediction.p_values.p_value), UNKNOWN))
    return said_of(prediction, manifest.classes)


def set_aside(places: Sequence[int], ids: Sequence[str], ranked: int) -> list[dict[str, Any]]:
    """Return rows that are set aside as /acquire answers them, behind so many that are ranked."""
    return [
        {"rank": rank, "index": i, "id": ids[i], "score": None, "control": True}
        for rank, i in enumerate(places, start=ranked + 1)
    ]


def acquired_rows(
    pool: Float32[np.ndarray, "N I"] | Mapping[int, Float32[np.ndarray, "I"]],
    ranked: list[dict[str, Any]],
    said: list[dict[str, Any]],
) -> list[AcquiredRow]:
    """Return the rows of an answer as they are kept; `said` is of those that are set aside, in
    their order."""
    of_control = iter(said)
    return [
        AcquiredRow(
            *(row["id"], row["rank"], row["score"], pool[row["index"]], row["control"]),
            next(of_control) if row["control"] else None,
        )
        for row in ranked
    ]
