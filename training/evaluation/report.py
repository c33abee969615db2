"""`python -m training evaluate`: the evaluation report of a published version, written beside it in
the store."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32
from tqdm import tqdm

from model_store.artifacts.manifest import InputSpec
from model_store.artifacts.report import EvaluationReport, publish_report
from model_store.artifacts.store import ModelStore
from model_store.errors import InvalidInput
from model_store.inference.model import Model
from model_store.inference.noise import MAX_SEED
from training import log
from training.calibration.calibrate import groups_known
from training.data import Dataset, Rows, leave_out, load, numbered_as, split, split_sizes
from training.evaluation import attack_suite
from training.evaluation.attacks import Attacked
from training.evaluation.differentiable_flag import DifferentiableFlag
from training.evaluation.even import noise_or_even
from training.evaluation.ids import near_rows_of_ids, random_ids
from training.evaluation.intervals import LEVEL, RESAMPLES, Ends
from training.evaluation.near_manifold import near_manifold
from training.evaluation.outliers import OPTION, OutlierSource, gaussian, some, uniform
from training.evaluation.parts import measure_parts
from training.evaluation.quality import (
    REQUEST_ROWS,
    ServedPrediction,
    ServedPredictor,
    losses,
    mean_scores,
    measure_attack,
    measure_sets,
    measure_test,
)
from training.evaluation.records import (
    Attack,
    ClassMeasures,
    Detectors,
    RegressionMeasures,
    Report,
    SetMeasures,
)
from training.evaluation.report_html import page
from training.evaluation.report_plots import (
    attacks_plot,
    cdf_plot,
    class_probabilities_plot,
    classes_plot,
    pit_plot,
    precision_recall_plot,
    predicted_plot,
    reliability_plot,
    risk_coverage_plot,
    roc_plot,
)
from training.evaluation.report_text import blocks, markdown
from training.evaluation.slices import worst_slices
from training.export.served import fitted_detectors
from training.provenance import Provenance
from training.recipe import override
from training.seeds import EvaluationStream, generator, hash_key
from training.versions import Parent, check_ids_of, fitted_data

MAX_DRAWS = 1000
SUMMED_UP = ("accuracy", "rmse", "crps", "log_likelihood", "brier", "expected_calibration_error")
LEFT_OUT = "left-out"  # the set of test rows whose classes the model does not know


@dataclass(frozen=True)
class Wanted:
    """What a report is asked for: rows of each set at most, draws (None: the version's default), a
    seed."""

    outliers: tuple[OutlierSource, ...] = ()
    attacks: bool = False
    rows: int = 1000
    draws: int | None = None
    seed: int = 0
    source: str | None = None  # of test rows, if not that of the fit


def evaluate_version(
    store: ModelStore,
    version: Parent,
    model: Model,
    root: Path,
    wanted: Wanted,
    quiet: bool = False,
) -> EvaluationReport:
    """Measure a version and write its report.

    Raises:
        InvalidInput: if there is no such data, or what is wanted does not go with the version.
    """
    manifest = version.manifest
    draws = checked_draws(version, wanted)
    data, is_fitted = data_of(version, root, wanted.source)
    other_rows = hash_key(wanted.seed, EvaluationStream.OUTLIER_ROWS)
    test = test_rows(data, wanted)
    names = [
        "uniform",
        "gaussian",
        "even",
        LEFT_OUT,
        *_near(test.take(np.arange(min(2, len(test)))), manifest.input, bool(data.classes), 0),
    ]
    clash = [source.name for source in wanted.outliers if source.name in names]
    if clash:
        raise InvalidInput(OPTION, f"names other than {names}", repr(clash[0]))
    sets = {
        **_noise(manifest.input, test, wanted.seed),
        **(
            {}
            if data.left_out is None
            else {LEFT_OUT: some(data.left_out, wanted.rows, other_rows)}
        ),
        **{
            source.name: source.rows(manifest.input, wanted.rows, other_rows, model.text_encoder)
            for source in wanted.outliers
        },
        **_near(test, manifest.input, bool(data.classes), wanted.seed),
    }
    sets = {name: rows.astype(np.float32) for name, rows in sets.items() if len(rows)}
    predictor = ServedPredictor(model, draws, wanted.seed)
    with _bar(1 + len(sets) + wanted.attacks * attack_suite.COUNT, quiet) as done:
        groups = groups_known(model.calibration, test, data.group_names)
        predicted = predictor("test", test.x.astype(np.float32), groups)
        done("test")
        measured = measure_test(predictor, predicted, test, data.classes)
        outliers, predicted_sets = measure_sets(predictor, predicted, sets, done)
        attacks = (
            _attacks(version, data, is_fitted, predictor, predicted, test, done)
            if wanted.attacks
            else {}
        )
    if wanted.attacks and not is_fitted:
        log.info("quiet PGD is left out: it needs the rows that the detectors were fitted on")
    loss, columns = losses(predicted.prediction.scores, test.y), manifest.input.columns
    slices = (
        worst_slices(test.x, columns, loss, manifest.task == "regression", wanted.seed)
        if columns
        else None
    )
    facts = Provenance.of(manifest)
    given: dict[str, Any] = {} if facts.convergence is None else {"convergence": facts.convergence}
    given |= {} if slices is None else {"worst_slices": slices}
    report = Report(
        model=manifest.name,
        version=manifest.version,
        task=manifest.task,
        method=manifest.method,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        data=wanted.source or version.recipe.data.source,
        seed=wanted.seed,
        draws=draws,
        judged_draws=predicted.prediction.rank_tables.num_draws,
        rows_per_request=REQUEST_ROWS,
        confidence_level=LEVEL,
        resamples=RESAMPLES,
        detectors=Detectors(
            all=list(predicted.prediction.detected), combined=list(manifest.detectors.combined)
        ),
        **given,
        summary=_summary(measured, outliers),
        summary_intervals=_summary_intervals(measured, outliers),
        test=measured,
        parts=measure_parts(predicted, test, data.classes, data.group_names, wanted.seed),
        outliers=outliers,
        attacks=attacks,
    )
    files = _plots(predicted, predicted_sets, test, report)
    text = blocks(report, sorted(files))
    pages = {
        "evidence.md": markdown(text),
        "evidence.html": page(f"{manifest.name} {manifest.version}", text, files),
    }
    files |= {name: content.encode() for name, content in pages.items()}
    return publish_report(store, manifest.name, manifest.version, report.content(), files)


def _noise(spec: InputSpec, test: Rows, seed: int) -> dict[str, Float32[np.ndarray, "N I"]]:
    """Return what stands for noise in rows of such a kind, by name."""
    if spec.takes_ids:
        return {"uniform": random_ids(spec, test.x, seed, EvaluationStream.UNIFORM)}
    even = noise_or_even(spec, test.x, seed)
    if even is not None:
        return {"even": even}
    return {"uniform": uniform(spec, len(test), seed), "gaussian": gaussian(spec, len(test), seed)}


def _near(
    test: Rows, spec: InputSpec, is_classified: bool, seed: int
) -> dict[str, Float32[np.ndarray, "N I"]]:
    """Return rows near the data that are not of it, by name."""
    made = near_rows_of_ids if spec.takes_ids else near_manifold
    return made(test.x, test.y, spec, is_classified, seed)


def checked_draws(version: Parent, wanted: Wanted) -> int:
    """Return the number of draws; refuse what does not go with the version."""
    noise = version.manifest.noise
    draws = wanted.draws or noise.default_draws
    most = min(noise.max_draws or MAX_DRAWS, MAX_DRAWS)
    if wanted.draws is not None and not 1 <= wanted.draws <= most:
        raise InvalidInput("--draws", f"1 to {most}", str(wanted.draws))
    if wanted.rows < 2:
        raise InvalidInput("--rows", "at least 2", str(wanted.rows))
    if not 0 <= wanted.seed <= MAX_SEED:
        raise InvalidInput("--seed", f"0 to {MAX_SEED}", str(wanted.seed))
    if wanted.attacks and version.manifest.task == "regression":
        raise InvalidInput(
            "--attacks", "a classification, since attacks change labels", "a regression"
        )
    if wanted.attacks and version.manifest.input.takes_ids:
        raise InvalidInput(
            "--attacks", "rows of numbers, since attacks follow gradients", "rows of ids"
        )
    if wanted.attacks and Provenance.of(version.manifest).pruned is not None:
        raise InvalidInput(
            "--attacks", "a version that is not pruned, since attacks need its gradients", "one"
        )
    if wanted.attacks and version.manifest.encoder is not None:
        raise InvalidInput(
            "--attacks", "a version without an encoder, since attacks need its gradients", "one"
        )
    names = [source.name for source in wanted.outliers]
    if len(set(names)) < len(names):
        raise InvalidInput(OPTION, "different names", f"{names}"[:200])
    return draws


def test_rows(data: Dataset, wanted: Wanted) -> Rows:
    """Return the test rows that are measured, as many as are wanted."""
    order = generator(wanted.seed, EvaluationStream.TEST_ROWS).permutation(len(data.test))
    return data.test.take(order[: wanted.rows])


def data_of(version: Parent, root: Path, source: str | None) -> tuple[Dataset, bool]:
    """Return the data, and whether they are those of the fit."""
    if source is None:
        return fitted_data(version, root), True
    recipe = override(version.recipe, source=source, leave_out=[])
    loaded = load(recipe, root, version.manifest.input.columns, version.tokenizer)
    known = leave_out(loaded, [name for name in loaded.classes if name not in version.classes])
    data = numbered_as(known, version.classes)
    if data.shape != version.manifest.input.shape:
        raise InvalidInput(
            "--data", f"rows of shape {version.manifest.input.shape}", f"{data.shape}"
        )
    check_ids_of(data, version.manifest, "--data")
    return data, data.digest() == Provenance.of(version.manifest).data_digest


def _attacks(
    version: Parent,
    data: Dataset,
    is_fitted: bool,
    predictor: ServedPredictor,
    predicted: ServedPrediction,
    test: Rows,
    done: Callable[[str], None],
) -> dict[str, Attack]:
    model = version.model().eval()
    train = split(data, split_sizes(version.recipe)).train
    spec = version.manifest.input
    network = fitted_detectors(model, train, version.recipe, version.manifest.input.shape)
    attacked = Attacked(network, model.posterior, spec.minimum, spec.maximum)
    statistic = (
        DifferentiableFlag(predictor.model.calibration, version.manifest.detectors.density)
        if is_fitted
        else None
    )
    measured = {}
    for made in attack_suite.attacks(attacked, test, statistic, predictor.seed):
        after = predictor(made.name, made.x)
        measures = measure_attack(predicted, after, test.y[made.index], predictor.seed)
        measured[made.name] = Attack(facts=made.facts, measures=measures)
        done(made.name)
    return measured


def _summary(
    test: ClassMeasures | RegressionMeasures, outliers: dict[str, SetMeasures]
) -> dict[str, float]:
    """Return the report's main figures, flat: what `GET /models/{name}` shows."""
    flagged = {f"test_flagged_at_{fpr}": rate for fpr, rate in test.flagged.items()}
    found = {f"{name}_flag_auroc": entry.scores["flag"].auroc for name, entry in outliers.items()}
    of_test = {f"test_{key}": getattr(test, key) for key in SUMMED_UP if hasattr(test, key)}
    return {**of_test, **flagged, **found}


def _summary_intervals(
    test: ClassMeasures | RegressionMeasures, outliers: dict[str, SetMeasures]
) -> dict[str, Ends]:
    """Return the confidence intervals of the summary's figures."""
    own = test.confidence_intervals
    flagged = {f"test_flagged_at_{fpr}": own[f"flagged.{fpr}"] for fpr in test.flagged}
    found = {
        f"{name}_flag_auroc": entry.scores["flag"].confidence_intervals["auroc"]
        for name, entry in outliers.items()
    }
    return {**{f"test_{key}": own[key] for key in SUMMED_UP if key in own}, **flagged, **found}


def _plots(
    test: ServedPrediction, sets: dict[str, ServedPrediction], rows: Rows, report: Report
) -> dict[str, bytes]:
    plots, names = {}, []
    if isinstance(report.test, ClassMeasures):
        main, label = "entropy", "error of the rows answered"
        plots["reliability.png"] = reliability_plot(report.test.reliability)
        names = [one.name for one in report.test.by_class]
        plots["classes.png"] = classes_plot(report.test.by_class)
        plots["class-probabilities.png"] = class_probabilities_plot(report.test.class_probabilities)
    else:
        main, label = "std", "mean squared error of the rows answered"
        plots["pit.png"] = pit_plot(report.test.pit, report.test.by_spread)
        plots["predicted.png"] = predicted_plot(test.prediction, rows.y)
    plots["risk-coverage.png"] = risk_coverage_plot(
        test, losses(test.prediction.scores, rows.y), label
    )
    plots[f"{main}-cdf.png"] = cdf_plot(test, sets, main)
    plots["roc.png"] = roc_plot(test, sets, ["flag", main])
    plots["precision-recall.png"] = precision_recall_plot(test, sets, rows.y, names)
    if report.attacks:
        assert isinstance(report.test, ClassMeasures)
        plots["fgsm.png"] = attacks_plot(report.test.accuracy, mean_scores(test), report.attacks)
    return plots


@contextlib.contextmanager
def _bar(total: int, quiet: bool) -> Iterator[Callable[[str], None]]:
    """Show how many sets are done; yields what is to be called after each."""
    with tqdm(total=total, unit="set", disable=quiet) as bar:

        def done(name: str) -> None:
            bar.set_postfix_str(name, refresh=False)
            bar.update()

        yield done
