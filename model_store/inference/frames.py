"""Predict arrays and DataFrames in Python with the same conversions as in the service."""

import operator
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
from jaxtyping import Float32

from model_store.conformal.calibration import DEFAULT_FPR, format_rate
from model_store.errors import InvalidInput
from model_store.inference.model import Model
from model_store.inference.noise import MAX_SEED
from model_store.inference.prediction import (
    Decision,
    DecisionOptions,
    Prediction,
    check_computed,
    decide,
)
from model_store.sources.arrow import name_categories
from model_store.sources.columns import fill_missing
from model_store.sources.parquet import ParquetFile, to_parquet
from model_store.sources.rows import RowReader

FIELD = "X"
ROWS_AT_ONCE = 512


def is_frame(X: Any) -> bool:
    return hasattr(X, "columns") and hasattr(X, "dtypes")


def to_table(X: Any, names: list[str] | None) -> pa.Table:
    """Convert a DataFrame or an array to a table. Unnamed columns are called x0, x1, ..."""
    if not is_frame(X):
        columns = [pa.array(column, from_pandas=True) for column in X.astype(np.float64).T]
        table = pa.Table.from_arrays(columns, names=[""] * len(columns))
    elif hasattr(X, "to_arrow"):  # polars
        columns = [_to_arrow(X[name], X[name].to_arrow, name) for name in X.columns]
        table = pa.Table.from_arrays(columns, names=X.columns)
    else:
        columns = [_pandas_column(X.iloc[:, i], name) for i, name in enumerate(X.columns)]
        table = pa.Table.from_arrays(columns, names=list(map(str, X.columns)))
    table = pa.Table.from_arrays(list(map(name_categories, table.columns)), table.column_names)
    return table.rename_columns(names or [f"x{i}" for i in range(table.num_columns)])


def _pandas_column(values: Any, name: object) -> Any:
    if str(values.dtype) == "category" and str(values.cat.categories.dtype).startswith("interval"):
        values = values.cat.rename_categories(str)  # of pandas.cut
    if hasattr(values, "sparse"):
        values = values.sparse.to_dense()
    return _to_arrow(values, partial(pa.array, values, from_pandas=True), name)


def _to_arrow(values: Any, convert: Callable[[], Any], name: object) -> Any:
    try:
        return convert()
    except (pa.ArrowException, TypeError, OverflowError):
        kinds = sorted({type(value).__name__ for value in values})
        expected = "values of one type (convert them by .astype(str), or leave the column out)"
        raise InvalidInput(f"column {name}"[:100], expected, ", ".join(kinds[:5])) from None


def predict(
    model: Model, X: Any, names: list[str] | None, num_samples: int | None, seed: int
) -> Prediction:
    """Predict all rows of an array or DataFrame with the same draws.

    `names` are X's column names. If `num_samples` is None, the model's default applies. Raise
    InvalidInput for an invalid row, column or option.
    """
    if len(X) == 0:
        raise InvalidInput(FIELD, "at least one row", "none")
    noise = model.manifest.noise
    draws = noise.default_draws if num_samples is None else operator.index(num_samples)
    if not 1 <= draws <= (noise.max_draws or draws):
        limit = "or more" if noise.max_draws is None else f"to {noise.max_draws}"
        raise InvalidInput("num_samples", f"1 {limit}", f"{draws}")
    if not 0 <= seed <= MAX_SEED:
        raise InvalidInput("seed", f"0 to {MAX_SEED}", f"{seed}")
    x = _encoded(model, X, names)
    groups = model.find_groups(x)
    missing = fill_missing(x, model.manifest.input.columns)
    draw_set = model.runtime.draw_set(seed, draws)
    blocks = (x[first : first + ROWS_AT_ONCE] for first in range(0, len(x), ROWS_AT_ONCE))
    parts = [model.prediction(*model.runtime.run_set(block, draw_set)) for block in blocks]
    prediction = Prediction.concatenate(parts)
    scores = prediction.scores
    check_computed(scores.by_name()[scores.overall], FIELD)
    prediction = prediction if groups is None else prediction.with_groups(groups)
    return replace(prediction, missing=missing)


def decide_as_served(
    model: Model, prediction: Prediction, fpr: float | None, coverage: float
) -> Decision:
    """Make the decisions that the service would make with its default options.

    The default `fpr` is 0.05, or the smallest that the model supports if that is larger. Raise
    InvalidInput for an invalid rate.
    """
    manifest, smallest = model.manifest, model.calibration.smallest_fpr
    fpr = max(DEFAULT_FPR, smallest) if fpr is None else fpr
    for option, value in (("fpr", fpr), ("coverage", coverage)):
        if not 0.0 < value < 1.0:
            raise InvalidInput(option, "a number between 0 and 1", f"{value}")
    if fpr < smallest:
        expected = f"at least {format_rate(smallest)}, the smallest that this model supports"
        raise InvalidInput("fpr", expected, f"{fpr}")
    risk = None if manifest.abstention is None else manifest.abstention.risk
    return decide(prediction, DecisionOptions(fpr, None, coverage, risk))


def _encoded(model: Model, X: Any, names: list[str] | None) -> Float32[np.ndarray, "N I"]:
    spec = model.manifest.input
    if not spec.columns and not is_frame(X):
        return RowReader(spec, FIELD).read_all(X)
    file = ParquetFile(to_parquet(to_table(X, names)), spec, FIELD)
    return RowReader(spec, FIELD, encoder=model.text_encoder).read_all(file)
