"""Validate a request's options against its model."""

import math

import numpy as np
from jaxtyping import Int64

from model_store.conformal.calibration import DEFAULT_FPR, format_rate
from model_store.conformal.mondrian import group_numbers
from model_store.conformal.rank_tables import confident_rank, largest_coverage
from model_store.errors import InvalidInput, TooLarge, describe_value
from model_store.inference.model import Model
from model_store.inference.prediction import DecisionOptions
from service import limits
from service.api.schemas import Envelope, PredictRequest
from service.settings import Settings

PRIORS_TOLERANCE = 1e-6  # for the sum of shares
INCOMPATIBLE_WITH_PRIORS = ("fdr", "risk", "confidence")


def resolve_num_samples(envelope: Envelope, model: Model, settings: Settings) -> int:
    noise, name = model.manifest.noise, model.manifest.name
    num_samples = envelope.num_samples or noise.default_draws
    if num_samples > settings.max_samples:
        raise InvalidInput("num_samples", f"at most {settings.max_samples}", str(num_samples))
    if noise.max_draws is not None and num_samples > noise.max_draws:
        expected = f"at most {noise.max_draws}, the number of different draws of {name}"
        raise InvalidInput("num_samples", expected, str(num_samples))
    return num_samples


def check_answer_size(envelope: PredictRequest, rows: int, num_samples: int, model: Model) -> None:
    max_numbers = limits.MAX_ANSWER_NUMBERS
    numbers = rows * num_samples * model.manifest.output_size
    if envelope.return_samples and numbers > max_numbers:
        raise TooLarge("return_samples", f"at most {max_numbers} numbers to return", str(numbers))
    if envelope.explain:
        max_rows, numbers = limits.MAX_EXPLAINED_ROWS, rows * model.row_size
        if rows > max_rows:
            raise TooLarge("explain", f"at most {max_rows} rows to explain", str(rows))
        if numbers > max_numbers:
            raise TooLarge("explain", f"maps of at most {max_numbers} numbers", str(numbers))


def decision_options(envelope: PredictRequest, model: Model, num_samples: int) -> DecisionOptions:
    smallest, name = model.calibration.smallest_fpr, model.manifest.name
    fpr = DEFAULT_FPR if envelope.fpr is None else envelope.fpr
    if envelope.fpr is not None and envelope.fdr is not None:
        raise InvalidInput("fdr", "either fdr or fpr to decide the flag", "both")
    field, rate = ("fpr", fpr) if envelope.fdr is None else ("fdr", envelope.fdr)
    if rate < smallest:
        expected = f"at least {format_rate(smallest)}, the smallest rate that {name} supports"
        raise InvalidInput(field, expected, f"{rate}")
    _check_confidence(envelope, fpr, model)
    priors = resolve_priors(envelope, model)
    if priors is not None:
        for name in INCOMPATIBLE_WITH_PRIORS:
            if getattr(envelope, name) is not None:
                raise InvalidInput(name, "no value with priors, which void its guarantee", "both")
        return DecisionOptions(fpr, None, envelope.coverage, None, None, priors)
    risk = _resolve_risk(envelope, model, num_samples, fpr)
    return DecisionOptions(fpr, envelope.fdr, envelope.coverage, risk, envelope.confidence)


def resolve_priors(envelope: Envelope, model: Model) -> tuple[float, ...] | None:
    """Return a request's class shares in the order of the model's classes."""
    priors, manifest = envelope.priors, model.manifest
    if priors is None:
        return None
    if manifest.categories is not None:
        kind = manifest.categories.kind
        expected = f"none, because {manifest.name} is calibrated by {kind}"
        raise InvalidInput("priors", expected, "some")
    label_shift = model.label_shift
    if manifest.classes is None:
        raise InvalidInput("priors", f"none, because {manifest.name} is a regression", "some")
    if manifest.priors is None or label_shift is None:
        version = f"{manifest.name} version {manifest.version}"
        expected = f"none, because {version} has no record of its class shares (fit it again)"
        raise InvalidInput("priors", expected, "some")
    missing = [name for name in manifest.classes if name not in priors]
    if missing or len(priors) > len(manifest.classes):
        received = f"no share of {missing[0]!r}"[:100] if missing else "unknown classes too"
        expected = f"a share of each of the {len(manifest.classes)} classes"
        raise InvalidInput("priors", expected, received)
    for name in manifest.classes:
        share = priors[name]
        if type(share) not in (int, float) or not 0.0 <= share <= 1.0:
            raise InvalidInput(f"priors.{name}"[:100], "a share from 0 to 1", describe_value(share))
    shares = tuple(float(priors[name]) for name in manifest.classes)
    if abs(sum(shares) - 1.0) > PRIORS_TOLERANCE:
        raise InvalidInput("priors", "shares that sum to 1", f"a sum of {sum(shares):.9g}")
    unknown = label_shift.unknown_classes(np.array(shares))
    if len(unknown):
        name = manifest.classes[int(unknown[0])]
        expected = "0, because no calibration row has this class"
        raise InvalidInput(f"priors.{name}"[:100], expected, f"{priors[name]:g}")
    return shares


def resolve_groups(
    envelope: PredictRequest, rows: int, model: Model
) -> Int64[np.ndarray, "N"] | None:
    """Return the group index of each row, or None for a request without `groups`."""
    spec = model.manifest.categories
    if envelope.groups is None:
        return None
    if spec is None or spec.kind != "group":
        expected = f"none, because {model.manifest.name} is not calibrated by group"
        raise InvalidInput("groups", expected, "some")
    if len(envelope.groups) != rows:
        expected = f"a group for each of the {rows} rows"
        raise InvalidInput("groups", expected, f"{len(envelope.groups)}")
    return group_numbers(envelope.groups, spec.names)


def _check_confidence(envelope: PredictRequest, fpr: float, model: Model) -> None:
    name = model.manifest.name
    if envelope.confidence is None:
        return
    rows = model.calibration.max_judged_rows
    if envelope.fdr is None and confident_rank(rows, 1.0 - fpr, envelope.confidence) > rows:
        smallest = math.ceil(1e4 * (1.0 - largest_coverage(rows, envelope.confidence))) / 1e4
        confidence = f"confidence {envelope.confidence:g} ({rows} rows)"
        expected = f"at least {smallest:g}, which {name} can guarantee with {confidence}"
        raise InvalidInput("fpr", expected, f"{fpr}")
    rows = model.calibration.max_true_rows
    if confident_rank(rows, envelope.coverage, envelope.confidence) > rows:
        largest = math.floor(1e4 * largest_coverage(rows, envelope.confidence)) / 1e4
        bound = f"at most {largest:g}" if largest > 0 else "none"
        confidence = f"confidence {envelope.confidence:g} ({rows} rows)"
        expected = f"{bound}, which {name} can guarantee with {confidence}"
        raise InvalidInput("coverage", expected, f"{envelope.coverage}")


def _resolve_risk(
    envelope: PredictRequest, model: Model, num_samples: int, fpr: float
) -> float | None:
    risk, confidence = envelope.risk, envelope.confidence
    spec, calibration = model.manifest.abstention, model.calibration
    if risk is None:
        return None if spec is None else spec.risk
    if spec is None:
        expected = f"none, because {model.manifest.name} is a regression"
        raise InvalidInput("risk", expected, f"{risk}")
    draws = calibration.calibrated_draws(num_samples)
    rank_tables = calibration.rank_tables[draws]
    if not rank_tables.certifies(fpr, risk, confidence):
        smallest = rank_tables.smallest_risk(fpr, confidence, risk)
        bound = f"at least {smallest:g}" if smallest < 1.0 else "none"
        expected = f"{bound}, which {model.manifest.name} can certify with {draws} draws"
        raise InvalidInput("risk", expected, f"{risk}")
    return risk
