"""Export and publish a fitted model."""

import platform
from dataclasses import asdict, replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from safetensors.numpy import save as save_arrays
from safetensors.torch import save

from model_store.artifacts.manifest import (
    ENCODER,
    GRAPHS,
    TOKENIZER,
    TRAINING_ROWS,
    ClassSpec,
    DetectorNames,
    Manifest,
    NoiseSpec,
    TargetSpec,
)
from model_store.artifacts.store import LATEST, ModelStore
from model_store.errors import InvalidInput
from model_store.inference.model import NEEDED, Model
from model_store.inference.training_rows import TrainingRows
from training import log
from training.calibration.calibrate import CategoryChoice
from training.data import load
from training.data.rows import Dataset, Rows, class_shares
from training.evaluation.pairs import list_worse_metrics
from training.evaluation.quality import measure
from training.export.graphs import export, joint_model, load_runtime, parity
from training.export.quantise import quantisation_error, quantise_network
from training.export.served import fit_detectors, fold
from training.folders import data_root
from training.networks.local import localise
from training.publishing.baselines import add_baselines, check_constant
from training.publishing.draft import (
    Draft,
    Exported,
    GateError,
    HeldOut,
    draft_version,
    publish_draft,
)
from training.recipe import Recipe
from training.seeds import Stream, generator
from training.versions import WEIGHTS, Provenance

if TYPE_CHECKING:
    from training.fit import Fitted

MAX_NUMBERS = 1 << 21  # in published training rows: 8 MB, or 2 MB of pixels
MAX_ID_LETTERS = 1000  # per training row


def publish(
    result: "Fitted",
    store: ModelStore,
    *,
    name: str | None = None,
    alias: str = LATEST,
    anyway: bool = False,
    draft: Draft | None = None,
) -> Manifest:
    """Publish a fitted model as the next version of `name`.

    `name` defaults to the recipe's name.

    Args:
        anyway: publish a model under `latest` even if it is worse than the constant baseline.
        draft: an earlier result of `assemble`.

    Raises:
        ParityError: if the outputs of the exported graphs differ from the model's.
        GateError: if the model under `latest` is worse than the gate's version or the constant.
        PreflightError: if the service could not load the version.
        InvalidInput: if the name is invalid.
    """
    recipe, name = result.recipe, name or result.recipe.name
    draft = draft or assemble(result)
    if alias == LATEST and not anyway:
        check_constant(name, draft)
    if recipe.gate is not None and alias == LATEST:
        check_gate(recipe, result.data, store, name, draft)
    manifest = publish_draft(store, name, draft, alias)
    result.discard_checkpoint()
    return manifest


def check_gate(recipe: Recipe, data: Dataset, store: ModelStore, name: str, draft: Draft) -> None:
    """Compare a draft with the version that the gate's alias refers to, if any.

    Raise GateError if the draft is significantly worse, or the versions cannot be compared.
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
    test = encode_rows_for(manifest, recipe, draft, data.test, data_root())
    if test is None:
        raise GateError(
            f"gate: {label} takes rows of another format, so it cannot be compared; move the "
            f"alias {gate.against}, or remove [gate] from the recipe"
        )
    if Provenance.of(manifest).data_digest != Provenance.of(draft.description).data_digest:
        message = "gate: %s was fitted on other data, which may include some of these test rows"
        log.info(message, label)
    model = Model.load(store.open(name, version, files=NEEDED))
    baseline = measure(model, test, data, recipe.seed).figures
    worse = list_worse_metrics(gate.metrics, draft.figures, baseline, label, recipe.seed)
    if worse:
        raise GateError("\n".join([f"gate: {name} is worse than {label} in", *worse]))
    log.info("gate: no worse than %s in %s", label, ", ".join(gate.metrics))


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


def assemble(result: "Fitted", only_constant: bool = False) -> Draft:
    """Export, calibrate and measure a model, and fit a table's baselines."""
    recipe, data, splits = result.recipe, result.data, result.splits
    shares = None
    target, transform = recipe.data.target or "y", result.transform
    output: TargetSpec | ClassSpec = TargetSpec(target=target, transform=transform)
    if recipe.task == "classification":
        classes = len(data.classes)
        # The class shares of later rows or other groups can differ from those in training.
        is_random_split = recipe.data.time is None and recipe.data.group is None
        held_out = np.concatenate([splits.reference.y, splits.ranking.y])
        shares = class_shares(data.train.y if is_random_split else held_out, classes)
        priors = tuple(class_shares(splits.train.y, classes).tolist())
        output = ClassSpec(classes=data.classes, priors=priors)
    facts = {"data_digest": data.digest(), "python": platform.python_version()}
    draft = draft_version(
        _export(result, output),
        HeldOut(data, recipe.seed, data.test, splits.reference, splits.ranking, shares),
        recipe.serving.risk,
        CategoryChoice.from_config(recipe.serving.calibration, data, recipe.data.group_column),
        result.provenance.model_copy(update=facts),
    )
    return add_baselines(draft, result, only_constant)


def _export(result: "Fitted", output: ClassSpec | TargetSpec) -> Exported:
    """Export a fitted model with its detectors, and check parity.

    int8 graphs are used if the recipe requests them and their error is below the Monte Carlo error.
    """
    recipe, data, splits, encoding = result.recipe, result.data, result.splits, result.encoding
    model = result.model.cpu().eval()
    fold(model)
    weights = {key: t.detach().clone().contiguous() for key, t in model.state_dict().items()}
    log.info("exporting to ONNX (up to a minute for the first fit of a large network)")
    shape = data.shape if encoding is None else model.network.shape
    served = localise(model, torch.from_numpy(splits.train.x))
    network = fit_detectors(served, splits.train, recipe, shape)
    # Columns are explained by their usual values; ids and encodings have no explanation.
    with_terms = not data.columns and not data.takes_ids and encoding is None
    joint = joint_model(model, served)
    files = export(served, network, with_terms, joint)
    runtime = load_runtime(served, files)
    differences = parity(served, network, runtime, splits.validation, joint)
    precision: Literal["float32", "int8"] = "float32"
    posterior = served.posterior
    if recipe.serving.precision == "int8":
        sampler, predictor = GRAPHS
        integers = {sampler: files[sampler], predictor: quantise_network(files[predictor])}
        quantised = load_runtime(served, integers)
        error = quantisation_error(runtime, quantised, splits.validation, recipe.serving.draws)
        differences |= asdict(error)
        if error.is_hidden:
            precision, runtime, files = "int8", quantised, integers
        else:
            log.info("keeping float32, because the int8 error exceeds the Monte Carlo error")
    noise = NoiseSpec(
        algorithm=posterior.algorithm,
        dimension=posterior.noise_dimension,
        theta_dimension=posterior.theta_dimension,
        paired=served.network.is_paired,
        default_draws=min(recipe.serving.draws, posterior.max_draws or recipe.serving.draws),
        max_draws=posterior.max_draws,
    )
    extra_files = nearest_rows(splits.train, data, recipe, is_encoded=encoding is not None)
    if encoding is not None:
        runtime.encoder = encoding.encoder
        extra_files[ENCODER] = encoding.path
    if data.tokenizer is not None:
        extra_files[TOKENIZER] = data.tokenizer
    return Exported(
        files={**files, WEIGHTS: save(weights), **extra_files},
        runtime=runtime,
        detectors=DetectorNames(
            combined=tuple(recipe.combined),
            density=tuple(network.density),
            two_sided=network.two_sided,
            attributed=network.attributed if runtime.terms_shape else (),
        ),
        fields={
            "method": recipe.method,
            "input": data.input,
            "output": output,
            "noise": noise,
            "encoder": None if encoding is None else encoding.spec,
            "precision": precision,
            "parity": differences,
        },
    )


def nearest_rows(
    train: Rows, data: Dataset, recipe: Recipe, is_encoded: bool = False
) -> dict[str, bytes | Path]:
    """Sample training rows, which later explain predictions as nearest neighbours.

    Distances use encoded columns, pixel values, or numbers and encodings in standard deviations.
    Rows of ids have no distance, so they get no file.
    """
    count = min(recipe.serving.nearest_rows, max(1, MAX_NUMBERS // train.x.shape[1]))
    if count == 0 or (data.takes_ids and not is_encoded):
        return {}
    index = np.sort(generator(recipe.seed, Stream.NEAREST_ROWS).permutation(len(train))[:count])
    sample = train.take(index)
    scale = np.ones(train.x.shape[1], dtype=np.float32)
    if is_encoded or (not data.columns and data.image is None):
        std = sample.x.astype(np.float64).std(axis=0).astype(np.float32)
        scale = np.where(std > 0, std, scale)
    ids = index if sample.ids is None else sample.ids
    names = tuple(str(name)[:MAX_ID_LETTERS] for name in ids.tolist())
    rows = TrainingRows(sample.x, scale, names, sample.y.astype(np.float64))
    return {TRAINING_ROWS: save_arrays(rows.tensors())}
