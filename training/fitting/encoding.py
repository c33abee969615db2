"""Export of a recipe's encoder (`network.encoder`), and encoding of rows before the fit."""

import math
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch

from model_store.artifacts.manifest import ENCODER, EncoderSpec
from model_store.errors import InvalidInput, one_line
from model_store.inference.encoder import Encoder
from training import log
from training.data.rows import Dataset, Rows, Splits
from training.export.encoders import EncoderInput, examine, file_graph, module_graph, serialise
from training.model import standardisation
from training.networks.architectures import call_factory, channels_first
from training.progress import Bar
from training.recipe import Recipe
from training.seeds import Stream, hash_key
from training.versions import Parent

ENCODED = "encoded.npy"  # training rows, then validation rows
EXAMPLES = 16  # training rows for the encoder's test
BATCH_ROWS = 64


@dataclass(frozen=True, eq=False)
class Encoding:
    """A tested encoder, and the path to its file in the run's folder."""

    path: Path
    encoder: Encoder

    @property
    def spec(self) -> EncoderSpec:
        return self.encoder.spec

    def encode(self, splits: Splits, quiet: bool = False) -> Splits:
        """Encode training and validation rows into a memory-mapped array.

        Other rows stay raw, because they are scored as the service scores raw rows.
        """
        train, validation = splits.train, splits.validation
        path = self.path.with_name(ENCODED)
        if not path.exists():
            draft = path.with_suffix(".tmp")
            shape = (len(train) + len(validation), self.spec.outputs)
            encoded = np.lib.format.open_memmap(draft, "w+", np.float32, shape)
            with Bar(len(encoded), "row", quiet, desc="encoding") as bar:
                parts = (encoded[: len(train)], train.x), (encoded[len(train) :], validation.x)
                for rows, x in parts:
                    for i in range(0, len(x), BATCH_ROWS):
                        batch = x[i : i + BATCH_ROWS].astype(np.float32)
                        rows[i : i + BATCH_ROWS] = self.encoder(batch)
                        bar.update(len(batch))
                        bar.report(f"encoded {bar.n} of {bar.total} rows")
            encoded.flush()
            draft.rename(path)
        encoded = np.load(path, mmap_mode="c")  # torch requires writable arrays
        return replace(
            splits,
            train=replace(train, x=encoded[: len(train)]),
            validation=replace(validation, x=encoded[len(train) :]),
        )


def encoder_graph(recipe: Recipe, data: Dataset) -> bytes | None:
    """Return the ONNX graph of a recipe's encoder, or None if there is no encoder."""
    network = recipe.network
    if network.encoder is None:
        return None
    if recipe.augmentation is not None:
        expected = "none, since the encoder encodes each row only once"
        raise InvalidInput("augmentation", expected, "one")
    rows = _encoder_input(recipe, data)
    if network.encoder_file is not None:
        return serialise(file_graph(Path(network.encoder_file), rows, network.output))
    shape = data.shape if data.takes_ids else channels_first(data.shape)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(hash_key(recipe.seed, Stream.INITIALISATION))
        module = call_factory("network.encoder", network.encoder, shape)
    try:
        return serialise(module_graph(module, shape, rows))
    except InvalidInput:
        raise
    except Exception as error:  # torch's exporter can raise any exception
        reason = f"{type(error).__name__}: {one_line(error)}"[:300]
        raise InvalidInput("network.encoder", "a module that ONNX can export", reason) from error


def make_encoding(
    graph: bytes, data: Dataset, train: Rows, folder: Path, parent: Parent | None
) -> Encoding:
    """Test an encoder on some training rows, and save its graph in the run's folder."""
    if parent is not None and parent.manifest.encoder is not None:
        digest, parent_digest = sha256(graph).hexdigest(), parent.manifest.files[ENCODER].sha256
        if digest != parent_digest:
            expected = f"the encoder of {parent.label}, {parent_digest[:12]}..."
            raise InvalidInput("network.encoder", expected, f"{digest[:12]}...")
    path, row_size = folder / ENCODER, math.prod(data.shape)
    path.write_bytes(graph)
    examples = train.x[:EXAMPLES].astype(np.float32)
    spec = examine(graph, row_size, examples)
    encoder = Encoder(graph, spec, row_size)
    if data.takes_ids:
        _check_largest_id(encoder, data)
    sizes = f"{row_size} numbers to {spec.outputs}, {1000 * encoder.row_s:.3g} ms a row"
    is_alone = spec.rows_at_once == 1
    reason = "; one row at a time, since a row's bits depend on the batch" if is_alone else ""
    log.info("encoder: %s%s", sizes, reason)
    return Encoding(path, encoder)


def _encoder_input(recipe: Recipe, data: Dataset) -> EncoderInput:
    network, shape = recipe.network, data.shape
    if data.takes_ids:
        pad_id = 0 if data.text is None else data.text.pad_id
        return EncoderInput(shape, takes_ids=True, pad_id=pad_id)
    if network.pixels is None:
        return EncoderInput(shape)
    mean, std = (tensor.numpy() for tensor in standardisation(network, channels_first(shape)))
    return (
        EncoderInput(shape, mean, std) if len(shape) == 3 else EncoderInput(shape, mean[0], std[0])
    )


def _check_largest_id(encoder: Encoder, data: Dataset) -> None:
    try:
        encoder.run(np.full((1, math.prod(data.shape)), data.maximum, dtype=np.float32))
    except Exception as error:
        expected = f"an encoder that accepts ids from 0 to {data.maximum:.0f}"
        raise InvalidInput("network.encoder", expected, one_line(error)) from None
