"""Why a row is strange: what each detector adds to the flag, what columns or numbers of the row do,
and which training rows are nearest.

*Detectors.* The flag's statistic is log mean_j exp(s_j) of the combined detectors' surprisals s_j,
so exp(s_j) / sum_l exp(s_l) is detector j's share of what is averaged, exactly: 1 / p_j of the
harmonic mean p-value.

*Columns.* The fall of the statistic, in nats, had one column its usual value (its median, its most
frequent category) and the others theirs, under the same draws. Falls do not add up: of two columns
that contradict each other, either may be put right. Squares of whitened columns, which do add up,
blamed the wrong one of correlated columns.

*Numbers* of other rows. A detector of the input has a score that is a squared length in the space
of inputs, |v|^2 = sum_i v_i^2 (`training.detectors` says what v is), so v_i^2 / |v|^2 is number i's
share of it, exactly, and its share of the flag is the sum over detectors of the two shares'
products. What is left, 1 - `attributed`, belongs to detectors that look at no number by itself
(scores of the posterior, and of features), and to those of the input that found *less* than is
usual: terms say what a large score is made of, not what a small one lacks.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float32, Float64

from model_store.artifacts.manifest import column_width
from model_store.conformal.detectors import flag_statistic, harmonic_shares
from model_store.inference.model import Model
from model_store.inference.prediction import Prediction
from model_store.sources.columns import Columns, usual_row
from model_store.types import Pause, no_pause

NEAREST = 5  # training rows that are named


@dataclass(frozen=True, eq=False)
class DividedFlag:
    """The flag's statistic of N rows in nats, by combined detector its share, and whether its score
    is lower than usual.
    """

    statistic: Float64[np.ndarray, "N"]
    share: dict[str, Float64[np.ndarray, "N"]]
    is_low: dict[str, Bool[np.ndarray, "N"]]

    @classmethod
    def of(cls, model: Model, prediction: Prediction) -> "DividedFlag":
        """Divide the flag of a prediction; each row by the detectors of as many draws as it
        took."""
        calibration, scores = model.calibration, prediction.calibrated_scores
        combined, num_rows = calibration.combined, len(scores.num_draws)
        statistic = np.empty(num_rows)
        share = {name: np.empty(num_rows) for name in combined}
        is_low = {name: np.empty(num_rows, dtype=bool) for name in combined}
        for draws in np.unique(scores.num_draws).tolist():
            rows = scores.num_draws == draws
            labels, detectors = scores.labels[rows], calibration.detectors(draws)
            detected = {name: prediction.detected[name][rows] for name in combined}
            surprisals = {name: detectors[name](detected[name], labels) for name in combined}
            statistic[rows] = flag_statistic(surprisals, combined)
            for name, of_rows in harmonic_shares(surprisals).items():
                share[name][rows] = of_rows
                is_low[name][rows] = detectors[name].is_low(detected[name], labels)
        return cls(statistic, share, is_low)


@dataclass(frozen=True, eq=False)
class Explanation:
    """Why N rows are strange: of a model of C columns their `falls`, of others the `shares` of a
    row's numbers, and the `nearest` training rows of each. What the version does not say is None.
    """

    flag: DividedFlag
    falls: Float64[np.ndarray, "N C"] | None
    shares: Float64[np.ndarray, "N I"] | None
    nearest: list[tuple[list[str], Float64[np.ndarray, "k"]]] | None


def rows_as_usual(
    columns: Columns, x: Float32[np.ndarray, "N I"], pause: Pause = no_pause
) -> Float32[np.ndarray, "M I"]:
    """Return each row, followed by itself with one column after the other as usual, M = N (1 + C).

    Raises ValueError if the usual value of a column is not known.
    """
    usual = usual_row(columns)
    if usual is None:
        raise ValueError("expected columns with usual values, got one without")
    ends = np.cumsum([column_width(column) for column in columns]).tolist()
    changed = np.repeat(x, 1 + len(columns), axis=0).reshape(len(x), 1 + len(columns), x.shape[1])
    for of_row in changed:
        for i, (start, end) in enumerate(zip([0, *ends], ends, strict=False), start=1):
            of_row[i, start:end] = usual[start:end]
        pause()
    return changed.reshape(-1, x.shape[1])


def falls(model: Model, as_usual: Prediction) -> Float64[np.ndarray, "N C"]:
    """Return by how much the flag's statistic falls, given the prediction of `rows_as_usual`."""
    statistic = DividedFlag.of(model, as_usual).statistic.reshape(
        -1, 1 + len(model.manifest.input.columns)
    )
    return statistic[:, :1] - statistic[:, 1:]


def explain(
    model: Model,
    prediction: Prediction,
    x: Float32[np.ndarray, "N I"],
    as_usual: Prediction | None = None,
    pause: Pause = no_pause,
) -> Explanation:
    """Explain predicted rows.

    Args:
        model: what predicted them.
        prediction: of the rows.
        x: the rows.
        as_usual: of a model of columns, the prediction of `rows_as_usual` under the same draws.
    """
    flag = DividedFlag.of(model, prediction)
    shares = np.zeros(x.shape) if model.runtime.has_terms else None
    nearest: list[tuple[list[str], np.ndarray]] = []
    for n, raw in enumerate(x):
        row = raw if model.training_rows is None else model.runtime.encoded(raw[None])[0]
        if shares is not None:
            shares[n] = _shares(model, flag, n, row)
        if model.training_rows is not None:
            nearest.append(model.training_rows.nearest(row, NEAREST))
        pause()
    return Explanation(
        flag,
        None if as_usual is None else falls(model, as_usual),
        shares,
        None if model.training_rows is None else nearest,
    )


def _shares(
    model: Model, flag: DividedFlag, n: int, row: Float32[np.ndarray, "I"]
) -> Float64[np.ndarray, "I"]:
    (terms,) = model.runtime.terms(row[None]).astype(np.float64)
    shares = np.zeros(len(row))
    for name, of_detector in zip(model.manifest.detectors.attributed, terms, strict=True):
        total = of_detector.sum()
        if name in flag.share and not flag.is_low[name][n] and 0.0 < total < np.inf:
            shares += flag.share[name][n] * of_detector / total
    return shares
