"""Tokenize text for training and the service with Hugging Face's `tokenizers`.

The tokenizer is the version's own `tokenizer.json`. Nothing is downloaded.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from jaxtyping import Float32

from model_store.artifacts.manifest import TextSpec
from model_store.errors import InvalidInput

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Per text, in UTF-8. A longer text cannot be cut before it is tokenized, because its end can change
# earlier tokens.
MAX_TEXT_BYTES = 1 << 18
MAX_TOKENIZER_BYTES = 1 << 26
TOKENISING_BYTES = 700  # memory per byte of normalised text, upper bound
NORMALISED_AT_ONCE = 4096  # characters, to bound memory
PADS = ("[PAD]", "<pad>", "<|pad|>")
TRIAL_TEXTS = ("a text", "\u00e9\u4e2d\U0001f9a5 qzx\n")  # common and rare characters
EXPECTED = "a tokenizer.json of Hugging Face's tokenizers"

T = TypeVar("T")


class TextEncoder:
    """A thread-safe tokenizer that converts texts to rows of ids."""

    def __init__(self, content: bytes, spec: TextSpec) -> None:
        self.spec = spec
        self.tokenizer = _read(content)
        vocabulary = self.tokenizer.get_vocab(with_added_tokens=True)
        self.vocabulary = 1 + max(vocabulary.values(), default=-1)
        if spec.pad_id >= self.vocabulary:
            raise ValueError(f"expected a padding token with id {spec.pad_id}")
        special = self.tokenizer.num_special_tokens_to_add(is_pair=False)
        if special >= spec.max_tokens:
            expected = f"more tokens than {special} special tokens"
            raise ValueError(f"expected {expected}, got {spec.max_tokens}")
        self.tokenizer.enable_truncation(spec.max_tokens, direction=spec.truncation)
        self.tokenizer.enable_padding(
            direction=spec.padding, pad_id=spec.pad_id, length=spec.max_tokens
        )
        for text in TRIAL_TEXTS:
            self.encoded(text)

    def bytes_for(self, text: str, field: str) -> int:
        """Return an upper bound on the memory needed to tokenize a text, in bytes."""
        try:
            size = len(text.encode())
        except UnicodeEncodeError:
            raise InvalidInput(field, "Unicode text", "a lone surrogate in it") from None
        if size > MAX_TEXT_BYTES:
            raise InvalidInput(field, f"text of at most {MAX_TEXT_BYTES} bytes in UTF-8", f"{size}")
        return TOKENISING_BYTES * max(size, self._normalised_bytes(text, field))

    def _normalised_bytes(self, text: str, field: str) -> int:
        """Return the size of a text after normalization, which can increase it up to 11-fold."""
        normaliser = self.tokenizer.normalizer
        if normaliser is None:
            return 0
        starts = range(0, len(text), NORMALISED_AT_ONCE)
        parts = (text[start : start + NORMALISED_AT_ONCE] for start in starts)
        try:
            forms = (_run(partial(normaliser.normalize_str, part), "") for part in parts)
            return sum(len(form.encode()) for form in forms)
        except ValueError:
            raise InvalidInput(field, "text that the version's tokenizer takes", "other") from None

    def row(self, text: str) -> Float32[np.ndarray, "I"]:
        """Tokenize a text whose size was checked with `bytes_for`."""
        return self.encoded(text)[0]

    def encoded(self, text: str) -> tuple[Float32[np.ndarray, "I"], bool]:
        """Tokenize a text. Also return whether it was truncated."""
        # Only batches release the interpreter lock
        (encoded,) = _run(lambda: self.tokenizer.encode_batch_fast([text]), "that takes every text")
        return np.array(encoded.ids, dtype=np.float32), bool(encoded.overflowing)


def text_spec(content: bytes, column: str, max_tokens: int) -> TextSpec:
    tokenizer = _read(content)
    padding, truncation = tokenizer.padding or {}, tokenizer.truncation or {}
    if "pad_id" in padding:
        pad_id = padding["pad_id"]
    else:
        candidates = (tokenizer.token_to_id(token) for token in PADS)
        pad_id = next((token for token in candidates if token is not None), None)
    if pad_id is None:
        expected = f"a tokenizer with padding or one of the tokens {', '.join(PADS)}"
        raise ValueError(f"expected {expected}, got neither")
    return TextSpec(
        column=column,
        max_tokens=max_tokens,
        pad_id=pad_id,
        truncation=truncation.get("direction", "right"),
        padding=padding.get("direction", "right"),
    )


def _read(content: bytes) -> "Tokenizer":
    if len(content) > MAX_TOKENIZER_BYTES:
        expected = f"{EXPECTED} of at most {MAX_TOKENIZER_BYTES} bytes"
        raise ValueError(f"expected {expected}, got {len(content)}")
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise ValueError("text models need the extra `text`") from None
    tokenizer = _run(lambda: Tokenizer.from_str(content.decode()), "")
    dropout = getattr(tokenizer.model, "dropout", None)
    if dropout:
        raise ValueError(f"expected a tokenizer whose model has no dropout, got one of {dropout:g}")
    return tokenizer


def _run(call: Callable[[], T], condition: str) -> T:
    """Call a library function and convert its errors and Rust panics to ValueError."""
    try:
        return call()
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = (str(error) or type(error).__name__).splitlines()[0][:200]
        expected = f"{EXPECTED} {condition}".strip()
        raise ValueError(f"expected {expected}, got something else: {reason}") from None
