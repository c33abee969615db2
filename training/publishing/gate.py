"""The gate of a recipe: a version is published only if it is no worse than another on named metrics of quality.

How much worse a value is than another depends on the metric: for some more is better, for some less, and some have a
value that they should have.
"""

from model_store.artifacts.manifest import Description
from model_store.artifacts.store import ModelStore
from model_store.errors import DubitoError
from training.facts import TrainingFacts
from training.messages import log
from training.recipe import BETTER, GateSection

ROUNDING = 1e-12


class GateError(DubitoError):
    """A version that its recipe's gate keeps out; nothing is published, and the run's checkpoint stays."""


def check_gate(gate: GateSection, store: ModelStore, name: str, description: Description) -> None:
    """Compare a version that is about to be published with the one that the gate's alias names.

    Where there is no such alias the gate passes, and says so.

    Raises:
        GateError: naming each metric that is worse by more than is allowed, with both values.
    """
    version = store.aliases(name).get(gate.against)
    if version is None:
        log.info("gate: %s has no alias %s yet, so there is nothing to be worse than", name, gate.against)
        return
    other = store.manifest(name, version)
    label = f"{gate.against} (version {version})"
    if TrainingFacts.of(other).data_digest != TrainingFacts.of(description).data_digest:
        log.info("gate: %s was measured on other data", label)
    failed = []
    for metric, allowed in gate.metrics.items():
        mine, its = description.quality.get(metric), other.quality.get(metric)
        if mine is None or its is None:
            failed.append(f"  {metric}: {_shown(mine)} against {_shown(its)} of {label}, which cannot be compared")
        elif worse_by(metric, mine, its) > allowed + ROUNDING:
            failed.append(
                f"  {metric}: {mine:.6g} against {its:.6g} of {label}, "
                f"worse by {worse_by(metric, mine, its):.6g}, allowed {allowed:g}"
            )
    if failed:
        raise GateError("\n".join([f"gate: {name} is not published, since it is worse than {label} in", *failed]))
    log.info("gate: no worse than %s in %s", label, ", ".join(gate.metrics))


def worse_by(metric: str, value: float, other: float) -> float:
    """Return by how much a value is worse than another, less than 0 where it is better."""
    better = BETTER[metric]
    if better == "more":
        return other - value
    if better == "less":
        return value - other
    return abs(value - better) - abs(other - better)


def _shown(value: float | None) -> str:
    return "nothing" if value is None else f"{value:.6g}"
