"""What a request asks to be decided: flags, sets or intervals, and whether to abstain."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float64

from model_store.conformal.abstention import NOTHING
from model_store.conformal.false_discovery import benjamini_hochberg
from model_store.conformal.stopping import StoppingRule
from model_store.errors import InvalidInput
from service.http.schemas import PredictRequest
from service.registry.models import Served


@dataclass(frozen=True)
class DecisionOptions:
    """Rates between 0 and 1. Without `fdr` a row is flagged by itself, at `fpr`; abstention and stopping go by `fpr`
    anyway.
    """

    fpr: float
    fdr: float | None
    coverage: float
    risk: float | None  # None: no row is left undecided
    rule: StoppingRule | None  # when a row stops drawing; None: at the request's number of draws

    def flags(self, p_value: Float64[np.ndarray, "N"]) -> Bool[np.ndarray, "N"]:
        """Return which rows of a request to flag: each by itself, or all together at a false discovery rate."""
        return p_value <= self.fpr if self.fdr is None else benjamini_hochberg(p_value, self.fdr)


def decision_options(
    envelope: PredictRequest, served: Served, num_samples: int, settle: float | None
) -> DecisionOptions:
    """Return a request's options; `settle` is the tolerance of requests that do not say theirs.

    Raises:
        InvalidInput: naming the field whose rate the model's calibration cannot give.
    """
    smallest = served.model.calibration.smallest_fpr
    if envelope.fpr is not None and envelope.fdr is not None:
        raise InvalidInput("fdr", "none beside fpr, since either decides the flag", "both")
    for field, rate in (("fpr", envelope.fpr), ("fdr", envelope.fdr)):
        if rate is not None and rate < smallest:
            expected = f"at least {smallest:.6g}, the smallest that {served.name} can tell"
            raise InvalidInput(field, expected, f"{rate}")
    fpr = served.model.calibration.default_fpr if envelope.fpr is None else envelope.fpr
    rule = _rule(envelope, fpr, settle)
    return DecisionOptions(
        fpr, envelope.fdr, envelope.coverage, _risk(envelope.risk, served, num_samples, fpr, rule), rule
    )


def _rule(envelope: PredictRequest, fpr: float, settle: float | None) -> StoppingRule | None:
    """Return when rows stop drawing; a request for every draw's samples that does not say has them all."""
    if "settle" in envelope.model_fields_set:
        if envelope.settle is not None and envelope.return_samples:
            raise InvalidInput("settle", "none beside return_samples, whose rows have as many draws each", "both")
        return None if envelope.settle is None else StoppingRule(fpr, envelope.settle)
    return None if settle is None or envelope.return_samples else StoppingRule(fpr, settle)


def _risk(
    wanted: float | None, served: Served, num_samples: int, fpr: float, rule: StoppingRule | None
) -> float | None:
    """Return the risk that is in force, if any."""
    spec, calibration = served.model.manifest.abstention, served.model.calibration
    if wanted is None:
        return None if spec is None else spec.risk
    if spec is None:
        raise InvalidInput(
            "risk", f"none, since {served.name} is a regression: no answer is right or wrong", f"{wanted}"
        )
    draws = calibration.draws_used(num_samples)
    rank_tables = calibration.rank_tables(draws, rule)
    if rank_tables.largest_uncertainty(fpr, wanted) == NOTHING:
        smallest = rank_tables.smallest_risk(fpr)
        known = f"at least {smallest:g}" if smallest < 1.0 else "none"
        raise InvalidInput("risk", f"{known}, which {served.name} can certify with {draws} draws", f"{wanted}")
    return wanted
