"""`python -m training compare`: two published versions compared in pairs, by figures of the same
test rows, each version as it is served."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from model_store.errors import InvalidInput
from model_store.inference.model import Model
from model_store.scores.classification import Scores
from training import log
from training.calibration.calibrate import groups_known
from training.data import Rows
from training.evaluation.evaluate import Wanted, check_wanted, data_of, say_rows, test_rows
from training.evaluation.figures import (
    LEVEL,
    RESAMPLES,
    Figure,
    Mean,
    Resamples,
    RiskCoverage,
    Share,
)
from training.evaluation.metrics import class_figures, regression_figures
from training.evaluation.pairs import Difference, Pairs, difference
from training.evaluation.quality import FPRS, ServedPredictor, losses, target_measures
from training.provenance import Provenance
from training.versions import Parent

TESTS = {"mcnemar": "McNemar, exact", "bootstrap": "bootstrap"}


@dataclass(frozen=True)
class Comparison:
    first: str
    second: str
    data: str
    rows: int
    seed: int
    differences: dict[str, Difference]
    pairs: Pairs | None  # of a classification

    def text(self) -> str:
        table = [("figure", self.first, self.second, "difference", "p", "test")]
        for name, found in self.differences.items():
            low, high = found.interval
            value = f"{found.value:+.4g} ({low:+.3g} to {high:+.3g})"
            figures = f"{found.first:.4g}", f"{found.second:.4g}"
            table.append((name, *figures, value, f"{found.p_value:.2g}", TESTS[found.test]))
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = [
            f"{self.second} against {self.first}: {self.rows} test rows of {self.data}, "
            f"seed {self.seed}, {100 * LEVEL:g} % intervals",
            *("  ".join(map(str.ljust, cells, widths)).rstrip() for cells in table),
        ]
        if self.pairs is not None:
            lines.append(
                f"Only {self.second} is right on {self.pairs.gained} rows, only {self.first} on "
                f"{self.pairs.lost}."
            )
        return "\n".join(lines)

    def content(self) -> dict[str, Any]:
        return {**asdict(self), "confidence_level": LEVEL, "resamples": RESAMPLES}


def compare_versions(
    versions: list[Parent], models: list[Model], root: Path, wanted: Wanted
) -> Comparison:
    first, second = versions
    if first.manifest.task != second.manifest.task or first.classes != second.classes:
        expected = f"the task and classes of {first.label}"
        raise InvalidInput("the second version", expected, f"others, of {second.label}")
    source = wanted.source or first.recipe.data.source
    data, are_fitted = zip(
        *(data_of(v, root, wanted.source if v is first else source) for v in versions), strict=True
    )
    is_fitted = any(are_fitted)
    tests = [test_rows(each, is_fitted, wanted) for each in data]
    say_rows(tests[0], data[0], is_fitted, source)
    if not np.array_equal(tests[0].y, tests[1].y):
        expected = f"one that takes the rows of {first.label}"
        raise InvalidInput("the second version", expected, second.label)
    digests = [Provenance.of(version.manifest).data_digest for version in versions]
    if digests[0] != digests[1]:
        said = "%s was fitted on other data, which may have had some of these test rows"
        log.info(said, second.label)
    predictors = []
    for version, model in zip(versions, models, strict=True):
        check_wanted(version, wanted)
        draws = wanted.draws or version.manifest.noise.default_draws
        predictors.append(ServedPredictor(model, draws, wanted.seed))
    ours, theirs = (
        _figures(predictor, test, each.group_names)
        for predictor, test, each in zip(predictors, tests, data, strict=True)
    )
    resamples = Resamples.of(len(tests[0]), wanted.seed)
    right = [ours.get("accuracy"), theirs.get("accuracy")]
    shares = [figure for figure in right if isinstance(figure, Share)]
    return Comparison(
        first=first.label,
        second=second.label,
        data=source,
        rows=len(tests[0]),
        seed=wanted.seed,
        differences={n: difference(ours[n], theirs[n], resamples) for n in ours if n in theirs},
        pairs=Pairs.of(*shares) if len(shares) == 2 else None,
    )


def _figures(
    predictor: ServedPredictor, test: Rows, group_names: tuple[str, ...]
) -> dict[str, Figure]:
    calibration = predictor.model.calibration
    groups = groups_known(calibration, test, group_names)
    predicted = predictor("test", test.x.astype(np.float32), groups)
    prediction, scores = predicted.prediction, predicted.prediction.scores
    if isinstance(scores, Scores):
        figures = class_figures(scores.probabilities, test.y)
    else:
        measures, ends = target_measures(predictor, test), prediction.intervals(0.95)
        assert ends is not None
        figures = regression_figures(scores.in_units, measures.log_likelihood, ends, test.y)
        figures["crps"] = Mean(measures.crps)
    p_value = prediction.judged_p_values.p_value
    for fpr in FPRS:
        if fpr >= calibration.smallest_fpr:
            figures[f"flagged.{fpr:g}"] = Share(p_value <= fpr)
    score = predicted.scores[scores.overall]
    figures[f"aurc.{scores.overall}"] = RiskCoverage(score, losses(scores, test.y))
    return figures
