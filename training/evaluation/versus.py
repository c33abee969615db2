"""Two published versions compared in pairs: figures of the same test rows, each version as it is
served."""

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
from training.evaluation.comparison import Difference, Pairs, difference
from training.evaluation.figures import Figure, Mean, RiskCoverage, Share
from training.evaluation.intervals import LEVEL, RESAMPLES, Resamples
from training.evaluation.metrics import class_figures, regression_figures
from training.evaluation.quality import FPRS, ServedPredictor, losses, target_measures
from training.evaluation.report import Wanted, checked_draws, data_of, test_rows
from training.evaluation.report_plots import differences_plot
from training.provenance import Provenance
from training.versions import Parent

TESTS = {"mcnemar": "McNemar, exact", "bootstrap": "bootstrap"}


@dataclass(frozen=True)
class Comparison:
    """What was found: each figure's difference, and of a classification the rows that one version
    alone has right."""

    first: str
    second: str
    data: str
    rows: int
    seed: int
    differences: dict[str, Difference]
    pairs: Pairs | None  # of a classification

    def text(self) -> str:
        """Return a table, in Markdown."""
        lines = [
            f"# {self.second} against {self.first}",
            "",
            f"{self.rows} test rows of `{self.data}`, the same for both, seed {self.seed}. A "
            "difference is the "
            "second version's figure less the first's, in brackets its "
            f"{100 * LEVEL:g} % interval; p is how often chance alone is as far from 0.",
            "",
            f"| figure | {self.first} | {self.second} | difference | p | test |",
            "| --- | --- | --- | --- | --- | --- |",
        ]
        for name, found in self.differences.items():
            low, high = found.interval
            lines.append(
                f"| {name} | {found.first:.4g} | {found.second:.4g} | {found.value:+.4g} "
                f"({low:+.3g} to {high:+.3g}) "
                f"| {found.p_value:.2g} | {TESTS[found.test]} |"
            )
        if self.pairs is not None:
            lines += [
                "",
                f"{self.second} alone is right on {self.pairs.gained} rows, {self.first} alone on "
                f"{self.pairs.lost}. "
                f"Bootstraps are of {RESAMPLES} samples of the rows.",
            ]
        return "\n".join(lines)

    def files(self) -> dict[str, bytes]:
        """Return the comparison as JSON, as Markdown, and as a plot."""
        content: dict[str, Any] = {
            **asdict(self),
            "confidence_level": LEVEL,
            "resamples": RESAMPLES,
        }
        return {
            "comparison.json": json.dumps(content, indent=1, allow_nan=False).encode(),
            "comparison.md": f"{self.text()}\n\n![comparison](comparison.png)\n".encode(),
            "comparison.png": differences_plot(self.differences, self.first, self.second),
        }


def compare_versions(
    versions: list[Parent], models: list[Model], root: Path, wanted: Wanted
) -> Comparison:
    """Compare the second version with the first, on test rows of the first one's data or of a
    source.

    Raises:
        InvalidInput: if there is no such data, or the versions do not take the same rows.
    """
    first, second = versions
    if first.manifest.task != second.manifest.task or first.classes != second.classes:
        field = "the second version"
        raise InvalidInput(
            field, f"the task and classes of {first.label}", f"others, of {second.label}"
        )
    sets, group_names = [], []
    for version in versions:
        source = wanted.source or first.recipe.data.source
        own = (
            wanted
            if version is first
            else Wanted(rows=wanted.rows, seed=wanted.seed, source=source)
        )
        data = data_of(version, root, own.source)[0]
        sets.append(test_rows(data, wanted))
        group_names.append(data.group_names)
    if not np.array_equal(sets[0].y, sets[1].y):
        raise InvalidInput(
            "the second version", f"one that takes the rows of {first.label}", second.label
        )
    if Provenance.of(first.manifest).data_digest != Provenance.of(second.manifest).data_digest:
        log.info(
            "%s was fitted on other data, which may have had some of these test rows", second.label
        )
    figures = [
        _figures(ServedPredictor(model, checked_draws(version, wanted), wanted.seed), rows, names)
        for version, model, rows, names in zip(versions, models, sets, group_names, strict=True)
    ]
    resamples = Resamples.of(len(sets[0]), wanted.seed)
    both = [name for name in figures[0] if name in figures[1]]
    accuracy = [of_version.get("accuracy") for of_version in figures]
    right = [figure for figure in accuracy if isinstance(figure, Share)]
    return Comparison(
        first=first.label,
        second=second.label,
        data=wanted.source or first.recipe.data.source,
        rows=len(sets[0]),
        seed=wanted.seed,
        differences={
            name: difference(figures[0][name], figures[1][name], resamples) for name in both
        },
        pairs=Pairs.of(*right) if len(right) == 2 else None,
    )


def _figures(
    predictor: ServedPredictor, test: Rows, group_names: tuple[str, ...]
) -> dict[str, Figure]:
    """Return what is compared of a version."""
    groups = groups_known(predictor.model.calibration, test, group_names)
    predicted = predictor("test", test.x.astype(np.float32), groups)
    prediction, scores = predicted.prediction, predicted.prediction.scores
    figures: dict[str, Figure]
    if isinstance(scores, Scores):
        figures = class_figures(scores.probabilities, test.y)
    else:
        measures, ends = target_measures(predictor, test), prediction.intervals(0.95)
        assert ends is not None
        figures = regression_figures(scores.in_units, measures.log_likelihood, ends, test.y)
        figures["crps"] = Mean(measures.crps)
    smallest = predictor.model.calibration.smallest_fpr
    p_value = prediction.judged_p_values.p_value
    flagged: dict[str, Figure] = {
        f"flagged.{fpr:g}": Share(p_value <= fpr) for fpr in FPRS if fpr >= smallest
    }
    areas = {
        f"aurc.{scores.overall}": RiskCoverage(
            predicted.scores[scores.overall], losses(scores, test.y)
        )
    }
    return {**figures, **flagged, **areas}
