"""The gate of a recipe: a version is published only if it is no worse than another on named metrics
of quality.

Both versions are scored as served on the same test rows and compared in pairs
(`training.evaluation.pairs`): a version is kept out if on some metric it is worse by more than
is allowed, beyond chance.
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
from training.evaluation.figures import LEVEL, Figure, Resamples
from training.evaluation.pairs import worse_by, worsening
from training.provenance import Provenance
from training.publishing.draft import Draft
from training.publishing.quality import Measurable, MeasuredRows
from training.recipe import GateSection, Recipe

ROUNDING = 1e-12
TESTS = {"mcnemar": "McNemar", "score": "Tango", "bootstrap": "bootstrap"}


class GateError(DubitoError):
    """A version that is not good enough to be published; what it says is why."""


def check_gate(
    recipe: Recipe, store: ModelStore, name: str, draft: Draft, rows: MeasuredRows, root: Path
) -> None:
    """Compare a version that is about to be published, on the rows that its quality was measured
    on, with the one that the recipe's gate names by an alias. Without such an alias the gate
    passes, and says so."""
    gate = recipe.gate
    assert gate is not None
    aliases = store.read_aliases(name)
    if gate.against in aliases.problems:
        raise GateError(f"gate: model {name}: {aliases.problems[gate.against]}")
    version = aliases.versions.get(gate.against)
    if version is None:
        log.info(
            "gate: %s has no alias %s yet, so there is nothing to be worse than", name, gate.against
        )
        return
    check_no_worse(
        recipe, gate, store.manifest(name, version), gate.against, store, draft, rows, root
    )


def check_no_worse(
    recipe: Recipe,
    gate: GateSection,
    manifest: Manifest,
    called: str,
    store: ModelStore,
    draft: Draft,
    rows: MeasuredRows,
    root: Path,
) -> None:
    """Compare a version that is about to be published with another, as `check_gate` does."""
    name, version = manifest.name, manifest.version
    label = f"{called} (version {version})"
    if Provenance.of(manifest).data_digest != Provenance.of(draft.description).data_digest:
        log.info(
            "gate: %s was fitted on other data, which may have had some of these test rows", label
        )
    test = encode_rows_for(manifest, recipe, draft, rows.test, root)
    if test is None:
        log.info(
            "gate: %s takes other rows, so the figures of either are compared as they are", label
        )
        failed = _worse_as_recorded(gate, manifest, draft, label)
    else:
        model = Model.load(store.open(name, version, files=NEEDED))
        others = Measurable.from_model(model).figures(
            MeasuredRows(test, rows.extent, rows.classes, rows.seed, rows.groups, manifest.input)
        )
        failed = list_worse_metrics(gate, draft.figures, others, label, rows.seed)
    if failed:
        raise GateError("\n".join([f"gate: {name} is worse than {label} in", *failed]))
    log.info("gate: no worse than %s in %s", label, ", ".join(gate.metrics))


def list_worse_metrics(
    gate: GateSection,
    figures: dict[str, Figure],
    others: dict[str, Figure],
    label: str,
    seed: int,
    rows: str = "rows",
) -> list[str]:
    """Return a line for each metric that is worse, and log one for each that is not; `rows` says of
    which."""
    failed = []
    for metric, allowed in gate.metrics.items():
        mine, its = figures.get(metric), others.get(metric)
        if mine is None or its is None:
            left, right = (None if figure is None else figure.value for figure in (mine, its))
            failed.append(_incomparable(metric, left, right, label))
            continue
        found = worsening(metric, mine, its, allowed, Resamples.draw(mine.rows, seed))
        low, high = found.interval
        line = (
            f"  {metric}: {mine.value:.6g} against {its.value:.6g} of {label} on the same "
            f"{mine.rows} {rows}, worse by {found.value:.6g} ({100 * LEVEL:g} % interval {low:.4g} "
            f"to {high:.4g}), p = {found.p_value:.2g} ({TESTS[found.test]}), allowed {allowed:g}"
        )
        if found.p_value <= gate.level and found.value > allowed + ROUNDING:
            failed.append(line)
        else:
            log.info("gate: %s", line.strip())
    return failed


def _worse_as_recorded(
    gate: GateSection, manifest: Manifest, draft: Draft, label: str
) -> list[str]:
    """Return a line for each metric of the manifests that is worse by more than is allowed."""
    failed = []
    for metric, allowed in gate.metrics.items():
        mine, its = draft.description.quality.get(metric), manifest.quality.get(metric)
        if mine is None or its is None:
            failed.append(_incomparable(metric, mine, its, label))
        elif (worse := worse_by(metric, mine, its)) > allowed + ROUNDING:
            against = f"{mine:.6g} against {its:.6g} of {label}"
            failed.append(f"  {metric}: {against}, worse by {worse:.6g}, allowed {allowed:g}")
    return failed


def encode_rows_for(
    manifest: Manifest, recipe: Recipe, draft: Draft, test: Rows, root: Path
) -> Rows | None:
    """Return the test rows as another version takes them, or None where it takes none such."""
    description = draft.description
    if manifest.task != description.task or not _reads_text_alike(manifest, draft):
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


def _reads_text_alike(manifest: Manifest, draft: Draft) -> bool:
    text = manifest.input.text
    if text is None or text != draft.description.input.text:
        return text == draft.description.input.text
    tokenizer = draft.files[TOKENIZER]
    assert isinstance(tokenizer, bytes)
    return manifest.files[TOKENIZER].sha256 == sha256(tokenizer).hexdigest()


def _incomparable(metric: str, mine: float | None, its: float | None, label: str) -> str:
    left, right = ("nothing" if value is None else f"{value:.6g}" for value in (mine, its))
    return f"  {metric}: {left} against {right} of {label}, which cannot be compared"
