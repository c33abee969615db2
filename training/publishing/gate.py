"""The gate, which refuses versions that are significantly worse than another.

The recipe names the metrics, and how much worse each may be. Both versions are scored as served on
the same test rows and compared in pairs (`training.evaluation.pairs`).
"""

from dataclasses import replace
from hashlib import sha256
from pathlib import Path

from model_store.artifacts.manifest import TOKENIZER, Manifest
from model_store.artifacts.store import ModelStore
from model_store.errors import DubitoError, InvalidInput
from model_store.inference.model import NEEDED, Model
from training import log
from training.data import Rows, load
from training.evaluation.figures import LEVEL, Ends, Figure, Resamples
from training.evaluation.pairs import worse_by, worsening
from training.provenance import Provenance
from training.publishing.draft import Draft
from training.publishing.quality import MeasuredRows, measure
from training.recipe import GateSection, Recipe

ROUNDING = 1e-12
SIGNIFICANCE = 0.05  # probability of refusing a version with exactly the allowed loss
TESTS = {"mcnemar": "McNemar", "score": "Tango", "bootstrap": "bootstrap"}


class GateError(DubitoError):
    """Raised if a version is not good enough to be published."""


def check_gate(
    recipe: Recipe, store: ModelStore, name: str, draft: Draft, rows: MeasuredRows, root: Path
) -> None:
    """Compare a draft with the version that the gate's alias refers to, if any.

    `rows` are the rows on which the draft's quality was measured.

    Raises:
        GateError: if the draft is significantly worse.
    """
    gate = recipe.gate
    assert gate is not None
    aliases = store.read_aliases(name)
    if gate.against in aliases.problems:
        raise GateError(f"gate: model {name}: {aliases.problems[gate.against]}")
    version = aliases.versions.get(gate.against)
    if version is None:
        log.info("gate: passed, because %s has no alias %s yet", name, gate.against)
        return
    check_no_worse(
        recipe, gate, store.manifest(name, version), gate.against, store, draft, rows, root
    )


def check_no_worse(
    recipe: Recipe,
    gate: GateSection,
    manifest: Manifest,
    title: str,
    store: ModelStore,
    draft: Draft,
    rows: MeasuredRows,
    root: Path,
) -> None:
    """Raise GateError if a draft is significantly worse than a published version.

    Messages call the published version `title`.
    """
    name, version = manifest.name, manifest.version
    label = f"{title} (version {version})"
    if Provenance.of(manifest).data_digest != Provenance.of(draft.description).data_digest:
        message = "gate: %s was fitted on other data, which may include some of these test rows"
        log.info(message, label)
    test = encode_rows_for(manifest, recipe, draft, rows.test, root)
    if test is None:
        message = "gate: %s takes rows of another format, so recorded figures are compared"
        log.info(message, label)
        worse = _list_worse_recorded(gate, manifest, draft, label)
    else:
        model = Model.load(store.open(name, version, files=NEEDED))
        baseline = measure(model, replace(rows, test=test, inputs=manifest.input)).figures
        worse = list_worse_metrics(gate, draft.figures, baseline, label, rows.seed)
    if worse:
        raise GateError("\n".join([f"gate: {name} is worse than {label} in", *worse]))
    log.info("gate: no worse than %s in %s", label, ", ".join(gate.metrics))


def list_worse_metrics(
    gate: GateSection,
    figures: dict[str, Figure],
    baselines: dict[str, Figure],
    label: str,
    seed: int,
    kind: str = "rows",
) -> list[str]:
    """List the metrics that are significantly worse, and log the others."""
    lines = []
    for metric, allowed in gate.metrics.items():
        figure, baseline = figures.get(metric), baselines.get(metric)
        if figure is None or baseline is None:
            left, right = (None if f is None else f.value for f in (figure, baseline))
            lines.append(_describe_incomparable(metric, left, right, label))
            continue
        result = worsening(metric, figure, baseline, allowed, Resamples.draw(figure.rows, seed))
        line = (
            f"  {metric}: {figure.value:.6g} against {baseline.value:.6g} of {label} on the same "
            f"{figure.rows} {kind}, {describe_loss(result.value, result.interval)}, "
            f"p = {result.p_value:.2g} ({TESTS[result.test]}), allowed {allowed:g}"
        )
        if result.p_value <= SIGNIFICANCE and result.value > allowed + ROUNDING:
            lines.append(line)
        else:
            log.info("gate: %s", line.strip())
    return lines


def _list_worse_recorded(
    gate: GateSection, manifest: Manifest, draft: Draft, label: str
) -> list[str]:
    """List the recorded metrics that are worse by more than the allowed amount."""
    lines = []
    for metric, allowed in gate.metrics.items():
        value, baseline = draft.description.quality.get(metric), manifest.quality.get(metric)
        if value is None or baseline is None:
            lines.append(_describe_incomparable(metric, value, baseline, label))
        elif (loss := worse_by(metric, value, baseline)) > allowed + ROUNDING:
            pair = f"{value:.6g} against {baseline:.6g} of {label}"
            lines.append(f"  {metric}: {pair}, {describe_loss(loss)}, allowed {allowed:g}")
    return lines


def describe_loss(loss: float, interval: Ends | None = None) -> str:
    """Describe a loss and its interval. A negative loss reads as an improvement."""
    text = f"{'better' if loss < 0 else 'worse'} by {abs(loss):.6g}"
    if interval is None:
        return text
    low, high = sorted(-end for end in interval) if loss < 0 else interval
    return f"{text} ({100 * LEVEL:g} % interval {low:.4g} to {high:.4g})"


def encode_rows_for(
    manifest: Manifest, recipe: Recipe, draft: Draft, test: Rows, root: Path
) -> Rows | None:
    """Encode test rows for another version, or return None if it cannot read them."""
    description = draft.description
    if manifest.task != description.task or not _has_same_text(manifest, draft):
        return None
    if manifest.input.columns == description.input.columns:
        return test if manifest.input.shape == description.input.shape else None
    if not manifest.input.columns:
        return None
    try:
        encoded = load(recipe, root, manifest.input.columns).test
    except InvalidInput:
        return None
    return replace(test, x=encoded.x) if len(encoded) == len(test) else None


def _has_same_text(manifest: Manifest, draft: Draft) -> bool:
    text = manifest.input.text
    if text is None or text != draft.description.input.text:
        return text == draft.description.input.text
    tokenizer = draft.files[TOKENIZER]
    assert isinstance(tokenizer, bytes)
    return manifest.files[TOKENIZER].sha256 == sha256(tokenizer).hexdigest()


def _describe_incomparable(
    metric: str, value: float | None, baseline: float | None, label: str
) -> str:
    left, right = ("no figure" if v is None else f"{v:.6g}" for v in (value, baseline))
    return f"  {metric}: {left} against {right} of {label}"
