"""Explain why rows are unusual in terms of detectors, columns and similar training rows.

*Detectors.* The flag's statistic is log mean_j exp(s_j) of the combined detectors' surprisals s_j.
So exp(s_j) / sum_l exp(s_l) is detector j's share of the mean, which is its share of the harmonic
mean p-value.

*Columns.* A column's fall is the decrease of the statistic, in nats, if the column had its usual
value (the median or the most frequent category), under the same draws. Falls do not add up: if two
columns contradict each other, correcting either of them can suffice.

*Numbers* of rows without columns. The score of an input detector is a squared length,
|v|^2 = sum_i v_i^2 (`training.detectors` defines v). So v_i^2 / |v|^2 is number i's share of the
score. Its share of the flag is the sum over detectors of the products of both shares. The rest,
1 - `attributed`, belongs to detectors without a share per number (scores of the posterior and of
features), and to input detectors with unusually small scores.
"""

from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Bool, Float32, Float64, Shaped

from model_store.artifacts.manifest import column_width
from model_store.conformal.detectors import harmonic_shares
from model_store.inference.model import Model
from model_store.inference.prediction import Prediction
from model_store.sources.columns import Columns, indicated_cells, unknown_cells, usual_row
from model_store.types import Pause, no_pause

NEAREST = 5  # training rows to return


@dataclass(frozen=True, eq=False)
class Explanation:
    """The explanations for N rows. Parts that the version does not support are None."""

    statistic: Float64[np.ndarray, "N"]  # of the flag, in nats
    detector_shares: dict[str, Float64[np.ndarray, "N"]]  # of the combined detectors
    is_low: dict[str, Bool[np.ndarray, "N"]]  # whether a detector's score is unusually small
    falls: Float64[np.ndarray, "N C"] | None = None  # by column
    shares: Float64[np.ndarray, "N I"] | None = None  # by number, without columns
    unseen: Bool[np.ndarray, "N C"] | None = None  # columns with an unknown category
    missing: Bool[np.ndarray, "N C"] | None = None  # columns without a value
    nearest_ids: Shaped[np.ndarray, "N k"] | None = None  # of training rows
    nearest_distances: Float64[np.ndarray, "N k"] | None = None


def replace_each_column(
    columns: Columns, x: Float32[np.ndarray, "N I"], pause: Pause = no_pause
) -> Float32[np.ndarray, "M I"]:
    """Return each row, followed by one copy per column with that column's usual value."""
    usual = usual_row(columns)
    ends = np.cumsum([column_width(column) for column in columns]).tolist()
    replaced = np.repeat(x, 1 + len(columns), axis=0).reshape(len(x), 1 + len(columns), x.shape[1])
    for variants in replaced:
        for i, (start, end) in enumerate(zip([0, *ends], ends, strict=False), start=1):
            variants[i, start:end] = usual[start:end]
        pause()
    return replaced.reshape(-1, x.shape[1])


def explain(
    model: Model,
    prediction: Prediction,
    x: Float32[np.ndarray, "N I"],
    replaced: Prediction | None = None,
    pause: Pause = no_pause,
    has_nearest: bool = True,
) -> Explanation:
    """Explain the predictions for some rows.

    Args:
        prediction: the model's prediction of `x`.
        replaced: the prediction of `replace_each_column` with the same draws, if there are columns.
        has_nearest: whether to find the nearest training rows.
    """
    combined, labels = model.calibration.names.combined, prediction.calibrated_scores.labels
    detectors = model.calibration.detectors[prediction.rank_tables.num_draws]
    explanation = Explanation(
        prediction.statistic,
        harmonic_shares({name: prediction.surprisals[name] for name in combined}),
        {name: detectors[name].is_low(prediction.detected[name], labels) for name in combined},
    )
    training_rows = model.training_rows if has_nearest else None
    shares = np.zeros(x.shape) if model.runtime.terms_shape else None
    ids, distances = list[list[str]](), list[np.ndarray]()
    for n, raw in enumerate(x):
        row = raw if training_rows is None else model.runtime.encoded(raw[None])[0]
        if shares is not None:
            shares[n] = _shares(model, explanation, n, row)
        if training_rows is not None:
            row_ids, row_distances = training_rows.nearest(row, NEAREST)
            ids.append(row_ids)
            distances.append(row_distances)
        pause()
    explanation = replace(explanation, shares=shares)
    if training_rows is not None:
        explanation = replace(
            explanation, nearest_ids=np.array(ids), nearest_distances=np.array(distances)
        )
    if replaced is None:
        return explanation
    columns = model.manifest.input.columns
    statistic = replaced.statistic.reshape(-1, 1 + len(columns))
    missing = indicated_cells(x, columns)
    if prediction.missing is not None:
        missing |= prediction.missing
    falls, unseen = statistic[:, :1] - statistic[:, 1:], unknown_cells(x, columns)
    return replace(explanation, falls=falls, unseen=unseen, missing=missing)


def _shares(
    model: Model, explanation: Explanation, n: int, row: Float32[np.ndarray, "I"]
) -> Float64[np.ndarray, "I"]:
    (terms,) = model.runtime.terms(row[None]).astype(np.float64)
    shares = np.zeros(len(row))
    for name, squares in zip(model.manifest.detectors.attributed, terms, strict=True):
        total = squares.sum()
        share = explanation.detector_shares.get(name)
        if share is not None and not explanation.is_low[name][n] and 0.0 < total < np.inf:
            shares += share[n] * squares / total
    return shares
