"""What comes before a recipe's network, made and examined before the fit: see `[network] encoder`
of a recipe."""

import math
import tempfile
from dataclasses import dataclass, replace
from hashlib import file_digest
from pathlib import Path

import numpy as np
import torch

from model_store.artifacts.manifest import ENCODER, EncoderSpec
from model_store.errors import InvalidInput, one_line
from model_store.inference.encoder import Encoder
from training.data import Dataset, Rows, Splits
from training.detectors.spectrum import LARGEST
from training.export.encoders import RowsTaken, examined, of_file, of_module, written
from training.fitting.encoded import SUFFIX, CachedEncoder
from training.messages import log
from training.model import split_network, standardisation
from training.networks.architectures import channels_first
from training.networks.split import NotSplit
from training.recipe import Recipe
from training.seeds import Stream, hash_key
from training.versions import Parent

FOLDER = "encoders"  # among the runs
EXAMPLES = 16  # training rows that an encoder is tried on


@dataclass(frozen=True, eq=False)
class Encoding:
    """An encoder that was examined: its file, what a manifest says of it, and itself, which keeps
    what it says."""

    path: Path
    spec: EncoderSpec
    encoder: CachedEncoder

    @property
    def digest(self) -> str:
        """The SHA-256 of its file."""
        return self.path.stem

    def of(self, splits: Splits, quiet: bool = False) -> Splits:
        """Return splits whose training and validation rows are encoded, as the network is fitted on
        them.

        The others are judged as they are served: raw.
        """
        return replace(
            splits,
            train=self._rows(splits.train, quiet),
            validation=self._rows(splits.validation, quiet),
        )

    def _rows(self, rows: Rows, quiet: bool) -> Rows:
        return replace(rows, x=self.encoder.rows(rows.x, quiet))


def with_encoder(
    recipe: Recipe, data: Dataset, train: Rows, runs: Path, parent: Parent | None = None
) -> tuple[Recipe, Encoding | None]:
    """Return a recipe that says whether its network has an encoder, and the encoder.

    A recipe that does not say has one where rows are long, layers are frozen, and rows are the same
    in all epochs.

    Args:
        recipe: of the fit.
        data: whose rows they are.
        train: the training rows, raw.
        runs: the folder of runs.
        parent: the version whose weights a fit goes on from, which has the same encoder, or none.

    Raises:
        InvalidInput: if the recipe's encoder cannot be one.
    """
    network = recipe.network
    is_told = network.encoder is not None
    like = (
        None
        if parent is None or parent.manifest.encoder is None
        else parent.manifest.files[ENCODER].sha256
    )
    if parent is not None and like is None and not is_told:
        return recipe, None
    may_have = (
        network.factory is not None and network.trained is not None and recipe.augmentation is None
    )
    if not is_told and not (may_have and math.prod(data.shape) > LARGEST):
        return recipe, None
    if network.encoder == "none":
        return recipe, None
    if recipe.augmentation is not None:
        expected = "none beside an encoder, which says once what it says of a row"
        raise InvalidInput("augmentation", expected, "one")
    is_picture = network.encoder_file is None and not data.takes_ids
    shape = channels_first(data.shape) if is_picture else data.shape
    mean, std = (tensor.numpy() for tensor in standardisation(network, channels_first(data.shape)))
    if network.encoder_file is not None and mean.ndim and len(shape) == 2:
        mean, std = mean[0], std[0]
    rows = RowsTaken(shape, mean, std) if network.pixel_mean is not None else RowsTaken(shape)
    if data.takes_ids:
        rows = RowsTaken(shape, takes_ids=True, pad_id=0 if data.text is None else data.text.pad_id)
    if network.encoder_file is not None:
        model = of_file(Path(network.encoder_file), rows, network.output)
    else:
        try:
            with torch.random.fork_rng(
                devices=[]
            ):  # what is random in a factory is what it will be in the model
                torch.manual_seed(hash_key(recipe.seed, Stream.INITIALISATION))
                parts = split_network(recipe, data.shape, len(data.classes), with_weights=True)
        except NotSplit as error:
            if is_told:
                raise InvalidInput(
                    "network.encoder", "a network that can be cut in two", str(error)
                ) from None
            log.info("frozen layers are computed anew in every epoch: %s", error)
            return recipe, None
        if parts is None:
            if is_told:
                expected = "frozen layers with weights before those that are drawn or trained"
                raise InvalidInput("network.encoder", expected, "none")
            return recipe, None
        try:
            model = of_module(parts.encoder, rows)
        except Exception as error:  # torch's exporter lets any kind through
            if is_told:
                reason = f"{type(error).__name__}: {one_line(error)}"[:300]
                raise InvalidInput(
                    "network.encoder", "frozen layers that can be exported", reason
                ) from error
            return (
                recipe,
                None,
            )  # the network as a whole is tried before the fit, and says which layer it is
    folder = runs / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".making-", dir=folder) as making:
        draft = Path(making) / ENCODER
        written(model, draft)
        del model
        examples = train.x[:EXAMPLES].astype(np.float32)
        spec = examined(draft, math.prod(data.shape), examples, network.rows_at_once)
        with draft.open("rb") as file:
            digest = file_digest(file, "sha256").hexdigest()
        path = draft.rename(folder / f"{digest}.onnx")
    if like is not None and like != digest:
        raise InvalidInput(
            "network.encoder",
            f"that of the version to go on from, {like[:12]}...",
            f"{digest[:12]}...",
        )
    encoder = Encoder(path, spec, math.prod(data.shape))
    if data.takes_ids:
        _check_largest_id(encoder, data)
    told = f"encoder: {math.prod(data.shape)} numbers of a row to {spec.outputs}, {1000 * encoder.row_s:.3g} ms a row"
    if spec.rows_at_once == 1 and network.rows_at_once is None:
        told += "; a row at a time, since rows among others get other bits"
    log.info("%s", told)
    rows_file = (
        folder / f"{digest}-{spec.rows_at_once}{SUFFIX}"
    )  # rows in other company may get other bits
    if not is_told:
        recipe = recipe.model_copy(
            update={"network": network.model_copy(update={"encoder": "frozen"})}
        )
    return recipe, Encoding(path, spec, CachedEncoder(encoder, spec.outputs, rows_file))


def _check_largest_id(encoder: Encoder, data: Dataset) -> None:
    """Raise InvalidInput if an encoder does not take the largest id that rows may have."""
    try:
        encoder.run(np.full((1, math.prod(data.shape)), data.maximum, dtype=np.float32))
    except Exception as error:
        expected = f"one that takes ids from 0 to {data.maximum:.0f}"
        raise InvalidInput("network.encoder", expected, one_line(error)) from None
