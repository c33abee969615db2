"""Comparison of two versions on the same test rows (`dubito compare`)."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from model_store.errors import InvalidInput
from model_store.inference.model import Model
from training import log
from training.data import Rows
from training.evaluation.evaluate import (
    EvaluationOptions,
    check_options,
    load_data,
    log_rows,
    test_rows,
)
from training.evaluation.figures import (
    LEVEL,
    RESAMPLES,
    Figure,
    Resamples,
    RiskCoverage,
    Share,
)
from training.evaluation.pairs import Difference, Pairs, difference
from training.evaluation.quality import ServedPredictor, losses, main_figures
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
    pairs: Pairs | None  # None for a regression

    def text(self) -> str:
        table = [("figure", self.first, self.second, "difference", "p", "test")]
        for name, result in self.differences.items():
            low, high = result.interval
            value = f"{result.value:+.4g} ({low:+.3g} to {high:+.3g})"
            figures = f"{result.first:.4g}", f"{result.second:.4g}"
            table.append((name, *figures, value, f"{result.p_value:.2g}", TESTS[result.test]))
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
    versions: list[Parent], models: list[Model], root: Path, options: EvaluationOptions
) -> Comparison:
    first, second = versions
    if first.manifest.task != second.manifest.task or first.classes != second.classes:
        expected = f"the task and classes of {first.label}"
        raise InvalidInput("the second version", expected, f"those of {second.label}")
    source = options.source or first.recipe.data.source
    data, fit_sources = zip(
        *(load_data(v, root, options.source if v is first else source) for v in versions),
        strict=True,
    )
    is_fitted = any(fit_sources)
    tests = [test_rows(dataset, is_fitted, options) for dataset in data]
    log_rows(tests[0], data[0], is_fitted, source)
    if not np.array_equal(tests[0].y, tests[1].y):
        expected = f"a version for the same rows as {first.label}"
        raise InvalidInput("the second version", expected, second.label)
    digests = [Provenance.of(version.manifest).data_digest for version in versions]
    if digests[0] != digests[1]:
        message = "%s was fitted on other data, which may include some of these test rows"
        log.info(message, second.label)
    predictors = []
    for version, model in zip(versions, models, strict=True):
        check_options(version, options)
        draws = options.draws or version.manifest.noise.default_draws
        predictors.append(ServedPredictor(model, draws, options.seed))
    first_figures, second_figures = (
        _figures(predictor, test, dataset.group_names)
        for predictor, test, dataset in zip(predictors, tests, data, strict=True)
    )
    resamples = Resamples.draw(len(tests[0]), options.seed)
    accuracies = [first_figures.get("accuracy"), second_figures.get("accuracy")]
    shares = [figure for figure in accuracies if isinstance(figure, Share)]
    return Comparison(
        first=first.label,
        second=second.label,
        data=source,
        rows=len(tests[0]),
        seed=options.seed,
        differences={
            name: difference(figure, second_figures[name], resamples)
            for name, figure in first_figures.items()
            if name in second_figures
        },
        pairs=Pairs.count(*shares) if len(shares) == 2 else None,
    )


def _figures(
    predictor: ServedPredictor, test: Rows, group_names: tuple[str, ...]
) -> dict[str, Figure]:
    predicted = predictor.test(test, group_names)
    prediction, scores = predicted.prediction, predicted.prediction.scores
    figures = main_figures(predicted, test.y)
    for fpr in predicted.flagged:
        figures[f"flagged.{fpr}"] = Share(prediction.judged_p_values.p_value <= float(fpr))
    score = predicted.scores[scores.overall]
    figures[f"aurc.{scores.overall}"] = RiskCoverage(score, losses(scores, test.y))
    return figures
