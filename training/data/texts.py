"""Text of a table's column as rows of the ids of its tokens, by a tokenizer that the recipe
names."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float32

from model_store.artifacts.manifest import LARGEST_ID, TextSpec
from model_store.errors import InvalidInput, one_line
from training import log
from training.data.arrays import path_below

if TYPE_CHECKING:
    from model_store.sources.text import TextEncoder
    from training.recipe import DataSection

MAX_TOKENIZER_BYTES = 1 << 26


@dataclass(frozen=True, eq=False)
class TextRows:
    encoder: "TextEncoder"
    tokenizer: bytes

    @classmethod
    def of(cls, section: "DataSection", root: Path, tokenizer: bytes | None) -> "TextRows":
        from model_store.sources.text import TextEncoder, text_spec  # slow, and for text alone

        assert section.text is not None
        content = _content(section, root) if tokenizer is None else tokenizer
        try:
            spec = text_spec(content, section.text, section.max_tokens, section.pad_token)
            encoder = TextEncoder(content, spec)
        except ValueError as error:
            expected, _, got = one_line(error).removeprefix("expected ").partition(", got ")
            raise InvalidInput("data.tokenizer", expected, got) from None
        if encoder.vocabulary > LARGEST_ID + 1:
            largest = f"{encoder.vocabulary - 1}"
            raise InvalidInput("data.tokenizer", f"ids up to {LARGEST_ID}", largest)
        return cls(encoder, content)

    @property
    def spec(self) -> TextSpec:
        return self.encoder.spec

    def of_table(self, columns: Mapping[str, Any]) -> Float32[np.ndarray, "N I"]:
        return self.encode(columns[self.spec.column])

    def encode(self, texts: Sequence[str | None]) -> Float32[np.ndarray, "N I"]:
        """Return texts as rows, and say how many are cut; a missing one is empty."""
        x = np.empty((len(texts), self.spec.max_tokens), dtype=np.float32)
        cut = 0
        for n, text in enumerate(texts):
            field = f"column {self.spec.column}, row {n}"
            self.encoder.bytes_for(text or "", field)
            try:
                x[n], is_cut = self.encoder.encoded(text or "")
            except ValueError:
                raise InvalidInput(field, "text that the tokenizer takes", "other text") from None
            cut += is_cut
        if cut:
            most = self.spec.max_tokens
            log.info("%d of %d texts are longer than %d tokens, and cut", cut, len(texts), most)
        return x


def _content(section: "DataSection", root: Path) -> bytes:
    assert section.tokenizer is not None
    path = path_below(root, section.tokenizer, "data.tokenizer")
    try:
        with path.open("rb") as file:
            return file.read(MAX_TOKENIZER_BYTES + 1)
    except OSError as error:
        reason = error.strerror or "an error"
        raise InvalidInput("data.tokenizer", f"a tokenizer.json at {path}", reason) from None
