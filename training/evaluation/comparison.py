"""`python -m training compare`: two published versions compared in pairs, by figures of the same
test rows, each version as it is served."""

import json
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
from training.evaluation.plots import differences_plot
from training.evaluation.quality import FPRS, ServedPredictor, losses, target_measures
from training.evaluation.report import Wanted, check_wanted, data_of, say_rows, test_rows
from training.evaluation.text import Block, Table, markdown
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
        rows = []
        for name, found in self.differences.items():
            low, high = found.interval
            by = f"{found.value:+.4g} ({low:+.3g} to {high:+.3g})"
            values = [f"{found.first:.4g}", f"{found.second:.4g}", by, f"{found.p_value:.2g}"]
            rows.append([name, *values, TESTS[found.test]])
        parts: list[Block] = [
            f"# {self.second} against {self.first}",
            f"{self.rows} test rows of `{self.data}`, the same for both, seed {self.seed}. A "
            "difference is the second version's figure less the first's, in brackets its "
            f"{100 * LEVEL:g} % interval; p is how often chance alone is as far from 0.",
            Table(["figure", self.first, self.second, "difference", "p", "test"], rows),
        ]
        if self.pairs is not None:
            parts.append(
                f"{self.second} alone is right on {self.pairs.gained} rows, {self.first} alone on "
                f"{self.pairs.lost}. Bootstraps are of {RESAMPLES} samples of the rows."
            )
        return markdown(parts).rstrip()

    def files(self) -> dict[str, bytes]:
        content: dict[str, Any] = asdict(self)
        content |= {"confidence_level": LEVEL, "resamples": RESAMPLES}
        return {
            "comparison.json": json.dumps(content, indent=1, allow_nan=False).encode(),
            "comparison.md": f"{self.text()}\n\n![comparison](comparison.png)\n".encode(),
            "comparison.png": differences_plot(self.differences, self.first, self.second),
        }


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
