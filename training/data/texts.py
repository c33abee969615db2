"""Tokenisation of a text column."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float32

from model_store.artifacts.manifest import LARGEST_ID, TextSpec
from model_store.errors import InvalidInput, one_line
from training import log
from training.data.arrays import resolve_path

if TYPE_CHECKING:
    from model_store.sources.text import TextEncoder
    from training.recipe import DataSection

MAX_TOKENIZER_BYTES = 1 << 26


@dataclass(frozen=True, eq=False)
class TextRows:
    encoder: "TextEncoder"
    tokenizer: bytes

    @classmethod
    def load(cls, section: "DataSection", root: Path, tokenizer: bytes | None) -> "TextRows":
        from model_store.sources.text import TextEncoder, text_spec  # This import is slow.

        assert section.text is not None
        content = _content(section, root) if tokenizer is None else tokenizer
        try:
            spec = text_spec(content, section.text, section.max_tokens)
            encoder = TextEncoder(content, spec)
        except ValueError as error:
            expected, _, received = one_line(error).removeprefix("expected ").partition(", got ")
            raise InvalidInput("data.tokenizer", expected, received) from None
        if encoder.vocabulary > LARGEST_ID + 1:
            largest = f"{encoder.vocabulary - 1}"
            raise InvalidInput("data.tokenizer", f"token ids up to {LARGEST_ID}", largest)
        return cls(encoder, content)

    @property
    def spec(self) -> TextSpec:
        return self.encoder.spec

    def encode(self, texts: Sequence[str | None]) -> Float32[np.ndarray, "N I"]:
        """Tokenise texts, truncating long ones and treating missing ones as empty."""
        x = np.empty((len(texts), self.spec.max_tokens), dtype=np.float32)
        truncated_texts = 0
        for n, text in enumerate(texts):
            field = f"column {self.spec.column}, row {n}"
            self.encoder.bytes_for(text or "", field)
            try:
                x[n], is_truncated = self.encoder.encoded(text or "")
            except ValueError:
                expected = "text that the tokenizer can encode"
                raise InvalidInput(field, expected, "other text") from None
            truncated_texts += is_truncated
        if truncated_texts:
            max_tokens = self.spec.max_tokens
            message = "truncating %d of %d texts to %d tokens"
            log.info(message, truncated_texts, len(texts), max_tokens)
        return x


def _content(section: "DataSection", root: Path) -> bytes:
    assert section.tokenizer is not None
    path = resolve_path(root, section.tokenizer, "data.tokenizer")
    try:
        with path.open("rb") as file:
            return file.read(MAX_TOKENIZER_BYTES + 1)
    except OSError as error:
        reason = error.strerror or "an error"
        raise InvalidInput("data.tokenizer", f"a tokenizer.json at {path}", reason) from None
