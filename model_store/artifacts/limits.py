"""What the calibration rows of a version cannot bear, in words: for who publishes it and who asks
it."""

from model_store.artifacts.manifest import CategorySpec, DetectorSpec
from model_store.conformal.calibration import DEFAULT_COVERAGE, DEFAULT_FPR, default_not_kept
from model_store.conformal.mondrian import CAUTIOUS_ROWS

SHOWN = 10  # categories by name


def too_few_rows(detectors: DetectorSpec, categories: CategorySpec | None) -> str | None:
    """Say for what requests that name no rates there are too few ranking rows; None where there are
    enough.

    Of a version that is calibrated by category it says for which of them.
    """
    if categories is None:
        return default_not_kept(detectors.ranking_rows)
    few = [
        (name, min(rows))
        for name, *rows in zip(
            categories.names, categories.judged_rows, categories.true_rows, strict=True
        )
        if min(rows) < CAUTIOUS_ROWS
    ]
    if not few:
        return None
    shown = ", ".join(f"{name[:40]} {rows}" for name, rows in few[:SHOWN])
    others = "" if len(few) <= SHOWN else f" and {len(few) - SHOWN} more"
    kept = (
        "is in every set"
        if categories.kind == "class"
        else "has sets and intervals that hold everything"
    )
    return (
        f"calibrated by {categories.kind}, and of {shown}{others} there are fewer than "
        f"{CAUTIOUS_ROWS} ranking rows: "
        f"at fpr {DEFAULT_FPR:g} such a {categories.kind} is not flagged, at coverage "
        f"{DEFAULT_COVERAGE:g} it {kept}"
    )
