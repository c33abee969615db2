"""The gate, which refuses versions that are significantly worse than another.

The recipe names the metrics, and how much worse each may be. Both versions are scored as served on
the same test rows and compared in pairs (`training.evaluation.pairs`). A version is significantly
worse if the 95 % interval of the loss lies above the allowed loss.
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
from training.evaluation.metrics import LEVEL, Ends, Figure, Resamples
from training.evaluation.pairs import measure_loss
from training.evaluation.quality import MeasuredRows, measure
from training.folders import data_root
from training.provenance import Provenance
from training.publishing.draft import Draft
from training.recipe import Recipe

ROUNDING = 1e-12


class GateError(DubitoError):
    """Raised if a version is not good enough to be published."""


def check_gate(
    recipe: Recipe, store: ModelStore, name: str, draft: Draft, rows: MeasuredRows
) -> None:
    """Compare a draft with the version that the gate's alias refers to, if any.

    `rows` are the rows on which the draft's quality was measured.

    Raises:
        GateError: if the draft is significantly worse, or the versions cannot be compared.
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
    manifest, label = store.manifest(name, version), f"{gate.against} (version {version})"
    test = encode_rows_for(manifest, recipe, draft, rows.test, data_root())
    if test is None:
        raise GateError(
            f"gate: {label} takes rows of another format, so it cannot be compared; move the "
            f"alias {gate.against}, or remove [gate] from the recipe"
        )
    if Provenance.of(manifest).data_digest != Provenance.of(draft.description).data_digest:
        message = "gate: %s was fitted on other data, which may include some of these test rows"
        log.info(message, label)
    model = Model.load(store.open(name, version, files=NEEDED))
    baseline = measure(model, replace(rows, test=test)).figures
    worse = list_worse_metrics(gate.metrics, draft.figures, baseline, label, rows.seed)
    if worse:
        raise GateError("\n".join([f"gate: {name} is worse than {label} in", *worse]))
    log.info("gate: no worse than %s in %s", label, ", ".join(gate.metrics))


def list_worse_metrics(
    tolerances: dict[str, float],
    figures: dict[str, Figure],
    baselines: dict[str, Figure],
    label: str,
    seed: int,
    kind: str = "rows",
) -> list[str]:
    """List the metrics that are significantly worse, and log the others."""
    lines = []
    for metric, allowed in tolerances.items():
        figure, baseline = figures.get(metric), baselines.get(metric)
        if figure is None or baseline is None:
            lines.append(f"  {metric}: it was not measured for both versions")
            continue
        loss, interval = measure_loss(metric, figure, baseline, Resamples.draw(figure.rows, seed))
        line = (
            f"  {metric}: {figure.value:.6g} against {baseline.value:.6g} of {label} on the same "
            f"{figure.rows} {kind}, {describe_loss(loss, interval)}, allowed {allowed:g}"
        )
        if interval[0] > allowed + ROUNDING:
            lines.append(line)
        else:
            log.info("gate: %s", line.strip())
    return lines


def describe_loss(loss: float, interval: Ends) -> str:
    """Describe a loss and its interval. A negative loss reads as an improvement."""
    low, high = sorted(-end for end in interval) if loss < 0 else interval
    ends = f"{100 * LEVEL:g} % interval {low:.4g} to {high:.4g}"
    return f"{'better' if loss < 0 else 'worse'} by {abs(loss):.6g} ({ends})"


def encode_rows_for(
    manifest: Manifest, recipe: Recipe, draft: Draft, test: Rows, root: Path
) -> Rows | None:
    """Encode test rows for another version, or return None if it cannot read them."""
    description, text = draft.description, manifest.input.text
    if manifest.task != description.task or text != description.input.text:
        return None
    if text is not None:
        tokenizer = draft.files[TOKENIZER]
        assert isinstance(tokenizer, bytes)
        if manifest.files[TOKENIZER].sha256 != sha256(tokenizer).hexdigest():
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
