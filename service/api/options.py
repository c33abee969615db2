"""From a request's fields, or the parameters of other protocols, to the options that its rows are
predicted and decided by."""

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from jaxtyping import Int64

from model_store.artifacts.manifest import CategorySpec
from model_store.conformal.calibration import DEFAULT_FPR, format_rate
from model_store.conformal.mondrian import UNKNOWN
from model_store.conformal.rank_tables import confident_rank, largest_coverage
from model_store.errors import InvalidInput
from model_store.inference.model import Model
from model_store.inference.prediction import DecisionOptions
from service import limits
from service.api.schemas import Envelope, PredictRequest
from service.errors import TooLarge
from service.settings import Settings

SUMS_TO_1 = 1e-6  # how near shares of classes must come
NOT_UNDER_PRIORS = ("fdr", "risk", "confidence")


class Named(Protocol):
    @property
    def model(self) -> Model: ...
    @property
    def name(self) -> str: ...
    @property
    def version(self) -> str: ...


def num_samples_of(envelope: Envelope, served: Named, settings: Settings) -> int:
    wanted = envelope.num_samples or served.model.manifest.noise.default_draws
    if wanted > settings.max_samples:
        raise InvalidInput("num_samples", f"at most {settings.max_samples}", str(wanted))
    most = served.model.manifest.noise.max_draws
    if most is not None and wanted > most:
        expected = f"at most {most}, since {served.name} has no more different draws"
        raise InvalidInput("num_samples", expected, str(wanted))
    return wanted


def refuse_large_answers(
    envelope: PredictRequest, rows: int, num_samples: int, served: Named
) -> None:
    model, most = served.model, limits.MAX_ANSWER_NUMBERS
    numbers = rows * num_samples * model.manifest.output_size
    if envelope.return_samples and numbers > most:
        raise TooLarge("return_samples", f"at most {most} numbers to return", str(numbers))
    if envelope.explain:
        most_rows, numbers = limits.MAX_EXPLAINED_ROWS, rows * model.row_size
        if rows > most_rows:
            raise TooLarge("explain", f"at most {most_rows} rows to explain", str(rows))
        if numbers > most:
            raise TooLarge("explain", f"at most {most} numbers of maps", str(numbers))


def decision_options(envelope: PredictRequest, served: Named, num_samples: int) -> DecisionOptions:
    smallest = served.model.calibration.smallest_fpr
    fpr = DEFAULT_FPR if envelope.fpr is None else envelope.fpr
    if envelope.fpr is not None and envelope.fdr is not None:
        raise InvalidInput("fdr", "none with fpr, since either decides the flag", "both")
    field, rate = ("fpr", fpr) if envelope.fdr is None else ("fdr", envelope.fdr)
    if rate < smallest:
        expected = f"at least {format_rate(smallest)}, the smallest that {served.name} can tell"
        raise InvalidInput(field, expected, f"{rate}")
    _refuse_uncertain_coverage(envelope, served)
    priors = priors_of(envelope, served)
    if priors is not None:
        for name in NOT_UNDER_PRIORS:
            if getattr(envelope, name) is not None:
                raise InvalidInput(name, "none with priors, under which it is not kept", "both")
        return DecisionOptions(fpr, None, envelope.coverage, None, None, priors)
    risk = _risk(envelope.risk, served, num_samples, fpr)
    return DecisionOptions(fpr, envelope.fdr, envelope.coverage, risk, envelope.confidence)


def priors_of(envelope: Envelope, served: Named) -> tuple[float, ...] | None:
    """Return the shares of the classes that a request states, in the model's order, None where it
    states none."""
    priors, manifest = envelope.priors, served.model.manifest
    if priors is None:
        return None
    if manifest.categories is not None:
        kind = manifest.categories.kind
        raise InvalidInput("priors", f"none, since {served.name} is calibrated by {kind}", "some")
    label_shift = served.model.label_shift
    if manifest.classes is None:
        raise InvalidInput("priors", f"none, since {served.name} is a regression", "some")
    if manifest.priors is None or label_shift is None:
        version = f"{served.name} version {served.version}"
        expected = f"none, since {version} does not say which shares it was fitted with"
        raise InvalidInput("priors", expected, "some (a version that is fitted today says it)")
    missing = [name for name in manifest.classes if name not in priors]
    if missing or len(priors) > len(manifest.classes):
        got = f"none of {missing[0]!r}"[:100] if missing else "others too"
        expected = f"a share of each of the {len(manifest.classes)} classes and of no other"
        raise InvalidInput("priors", expected, got)
    shares = tuple(priors[name] for name in manifest.classes)
    for name, share in zip(manifest.classes, shares, strict=True):
        if not 0.0 <= share <= 1.0:
            raise InvalidInput(f"priors.{name}"[:100], "a share from 0 to 1", f"{share:g}")
    for name, share, known in zip(manifest.classes, shares, manifest.priors, strict=True):
        if share > 0 and known == 0:
            expected = "0, since no training row is of this class"
            raise InvalidInput(f"priors.{name}"[:100], expected, f"{share:g}")
    if abs(sum(shares) - 1.0) > SUMS_TO_1:
        raise InvalidInput("priors", "shares that sum to 1", f"a sum of {sum(shares):.9g}")
    unknown = label_shift.unknown_classes(np.array(shares))
    if len(unknown):
        name = manifest.classes[int(unknown[0])]
        expected = "0, since no row of this class calibrated"
        raise InvalidInput(f"priors.{name}"[:100], expected, f"{priors[name]:g}")
    return shares


def groups_of(envelope: PredictRequest, rows: int, served: Named) -> Int64[np.ndarray, "N"] | None:
    """Return the number of each row's group, `UNKNOWN` of one that the model's calibration rows
    have not; None where there are no groups."""
    spec = served.model.manifest.categories
    is_by_group = spec is not None and spec.kind == "group"
    if envelope.groups is not None and not is_by_group:
        expected = f"none, since {served.name} is not calibrated by group"
        raise InvalidInput("groups", expected, "some")
    if spec is None or not is_by_group:
        return None
    if envelope.groups is None:
        return np.full(rows, UNKNOWN)
    if len(envelope.groups) != rows:
        raise InvalidInput("groups", f"one for each of the {rows} rows", f"{len(envelope.groups)}")
    return group_numbers(envelope.groups, spec)


def group_numbers(groups: Sequence[str], spec: CategorySpec) -> Int64[np.ndarray, "N"]:
    numbers = {name: number for number, name in enumerate(spec.names)}
    return np.array([numbers.get(group, UNKNOWN) for group in groups], dtype=np.int64)


def _refuse_uncertain_coverage(envelope: PredictRequest, served: Named) -> None:
    if envelope.confidence is None:
        return
    rows = served.model.calibration.max_true_rows
    if confident_rank(rows, envelope.coverage, envelope.confidence) > rows:
        largest = math.floor(1e4 * largest_coverage(rows, envelope.confidence)) / 1e4
        known = f"at most {largest:g}" if largest > 0 else "none"
        confidence = f"confidence {envelope.confidence:g} ({rows} rows)"
        expected = f"{known}, which {served.name} can keep with {confidence}"
        raise InvalidInput("coverage", expected, f"{envelope.coverage}")


def _risk(wanted: float | None, served: Named, num_samples: int, fpr: float) -> float | None:
    spec, calibration = served.model.manifest.abstention, served.model.calibration
    if wanted is None:
        return None if spec is None else spec.risk
    if spec is None:
        expected = f"none, since {served.name} is a regression: no answer is right or wrong"
        raise InvalidInput("risk", expected, f"{wanted}")
    draws = calibration.calibrated_draws(num_samples)
    rank_tables = calibration.rank_tables(draws)
    if not rank_tables.certifies(fpr, wanted):
        smallest = rank_tables.smallest_risk(fpr)
        known = f"at least {smallest:g}" if smallest < 1.0 else "none"
        expected = f"{known}, which {served.name} can certify with {draws} draws"
        raise InvalidInput("risk", expected, f"{wanted}")
    return wanted
