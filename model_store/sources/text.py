"""Text as rows of the ids of its tokens: one encoding for training and for the service.

A tokenizer is the `tokenizer.json` of Hugging Face's `tokenizers`, read from the bytes that the
manifest's SHA-256 is of: nothing is fetched. It adds its special tokens; longer text is truncated
and shorter text is padded, as a model's `TextSpec` says. The same text always gives the same ids.
"""

import os
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from jaxtyping import Float32

from model_store.artifacts.manifest import TextSpec
from model_store.errors import InvalidInput

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Read at each tokenisation, which then takes the calling thread alone.
os.environ["TOKENIZERS_PARALLELISM"] = "false"

# Of one text, in UTF-8: a fifth of a second or so. It is not cut before: what is cut off may change
# what is kept.
MAX_TEXT_BYTES = 1 << 18
MAX_TOKENIZER_BYTES = 1 << 26
TOKENISING_BYTES = 700  # that it takes for each byte of a text once it is normalised, at most
NORMALISED_AT_ONCE = 4096  # characters: normalising takes memory too
PADS = ("[PAD]", "<pad>", "<|pad|>")
TRIED = ("a text", "\u00e9\u4e2d\U0001f9a5 qzx\n")  # also of words that hardly any tokenizer knows
EXPECTED = "a tokenizer.json of Hugging Face's tokenizers"

T = TypeVar("T")


class TextEncoder:
    """Text to rows of ids. Several threads may ask at once."""

    def __init__(self, content: bytes, spec: TextSpec) -> None:
        self.spec = spec
        self.tokenizer = _read(content)
        self.vocabulary = 1 + max(
            self.tokenizer.get_vocab(with_added_tokens=True).values(), default=-1
        )
        if spec.pad_id >= self.vocabulary:
            raise ValueError(f"expected a token of id {spec.pad_id}, by which rows are padded")
        special = self.tokenizer.num_special_tokens_to_add(is_pair=False)
        if special >= spec.max_tokens:
            raise ValueError(
                f"expected room for text besides {special} special tokens, got {spec.max_tokens} "
                "in all"
            )
        self.tokenizer.enable_truncation(spec.max_tokens, direction=spec.truncation)
        self.tokenizer.enable_padding(
            direction=spec.padding, pad_id=spec.pad_id, length=spec.max_tokens
        )
        for text in TRIED:
            self.encoded(text)

    def bytes_for(self, text: str, field: str) -> int:
        """Return how many bytes of memory tokenising a text takes, at most."""
        try:
            size = len(text.encode())
        except UnicodeEncodeError:
            raise InvalidInput(field, "Unicode text", "a lone surrogate in it") from None
        if size > MAX_TEXT_BYTES:
            raise InvalidInput(field, f"text of at most {MAX_TEXT_BYTES} bytes in UTF-8", f"{size}")
        return TOKENISING_BYTES * max(size, self._normalised_bytes(text, field))

    def _normalised_bytes(self, text: str, field: str) -> int:
        """Return how long a text is once it is normalised: NFKC makes 33 bytes of three."""
        normaliser = self.tokenizer.normalizer
        if normaliser is None:
            return 0
        starts = range(0, len(text), NORMALISED_AT_ONCE)
        parts = (text[start : start + NORMALISED_AT_ONCE] for start in starts)
        try:
            return sum(
                len(_run(partial(normaliser.normalize_str, part), "").encode()) for part in parts
            )
        except ValueError:
            raise InvalidInput(field, "text that the version's tokenizer takes", "other") from None

    def row(self, text: str) -> Float32[np.ndarray, "I"]:
        """Return a text, that `bytes_for` lets pass, as a row of ids."""
        return self.encoded(text)[0]

    def encoded(self, text: str) -> tuple[Float32[np.ndarray, "I"], bool]:
        """Return a text as `row` does, and whether it was longer and is cut."""
        # A batch, even of one, lets go of the interpreter.
        (encoded,) = _run(lambda: self.tokenizer.encode_batch_fast([text]), "that takes every text")
        return np.array(encoded.ids, dtype=np.float32), bool(encoded.overflowing)


def text_spec(content: bytes, column: str, max_tokens: int, pad_token: str | None) -> TextSpec:
    """Return how a tokenizer pads and truncates: as its file says, else at the right."""
    tokenizer = _read(content)
    padding, truncation = tokenizer.padding or {}, tokenizer.truncation or {}
    if pad_token is not None:
        pad_id = tokenizer.token_to_id(pad_token)
    elif "pad_id" in padding:
        pad_id = padding["pad_id"]
    else:
        found = (tokenizer.token_to_id(token) for token in PADS)
        pad_id = next((token for token in found if token is not None), None)
    if pad_id is None:
        wanted = (
            "one of its tokens, by which text is padded"
            if pad_token
            else f"one of {', '.join(PADS)} among them"
        )
        raise ValueError(f"expected {wanted}, got {pad_token or 'none'!r}")
    return TextSpec(
        column=column,
        max_tokens=max_tokens,
        pad_id=pad_id,
        truncation=truncation.get("direction", "right"),
        padding=padding.get("direction", "right"),
    )


def _read(content: bytes) -> "Tokenizer":
    if len(content) > MAX_TOKENIZER_BYTES:
        raise ValueError(
            f"expected {EXPECTED} of at most {MAX_TOKENIZER_BYTES} bytes, got {len(content)}"
        )
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise ValueError("expected the package of the extra `text` for texts, got none") from None
    tokenizer = _run(lambda: Tokenizer.from_str(content.decode()), "")
    dropout = getattr(tokenizer.model, "dropout", None)
    if dropout:
        raise ValueError(f"expected a tokenizer whose model has no dropout, got one of {dropout:g}")
    return tokenizer


def _run(call: Callable[[], T], what: str) -> T:
    """Return what the library gives.

    Raises:
        ValueError: whatever it raises: it has no errors of its own, and its panics are no
            Exceptions.
    """
    try:
        return call()
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = (str(error) or type(error).__name__).splitlines()[0][:200]
        expected = f"{EXPECTED} {what}".strip()
        raise ValueError(f"expected {expected}, got something else: {reason}") from None
