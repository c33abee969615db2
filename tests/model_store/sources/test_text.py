import json
import socket
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from model_store.artifacts.manifest import TextSpec
from model_store.errors import InvalidInput
from model_store.sources.text import MAX_TEXT_BYTES, TOKENISING_BYTES, TextEncoder, _run, text_spec
from tests.support.process import HEAP_BYTES, fresh_process, peak_growth_bytes
from tests.support.texts import SPECIAL, VOCABULARY, texts, tokenizer

TOKENIZER_FILE = tokenizer().to_str().encode()
CLS, UNK, PAD = 2, 1, 0


def spec(max_tokens=6, **changes):
    return TextSpec(column="text", max_tokens=max_tokens, pad_id=PAD, **changes)


def encode(text, **changes):
    return TextEncoder(TOKENIZER_FILE, spec(**changes)).row(text).tolist()


def token_id(name):
    return tokenizer().token_to_id(name)


@pytest.mark.parametrize(
    ("text", "changes", "expected"),
    [
        ("the film", {}, [CLS, token_id("the"), token_id("film"), PAD, PAD, PAD]),
        ("the film", {"padding": "left"}, [PAD, PAD, PAD, CLS, token_id("the"), token_id("film")]),
        ("", {}, [CLS, PAD, PAD, PAD, PAD, PAD]),
        ("the zebra", {}, [CLS, token_id("the"), UNK, PAD, PAD, PAD]),
        ("a film was very good", {"max_tokens": 4}, [CLS, *map(token_id, ("a", "film", "was"))]),
        (
            "a film was very good",
            {"max_tokens": 4, "truncation": "left"},
            [CLS, *map(token_id, ("was", "very", "good"))],
        ),
    ],
)
def test_text_is_truncated_and_padded_according_to_the_spec(text, changes, expected):
    assert encode(text, **changes) == expected


def test_padding_and_truncation_default_to_the_tokenizer_file():
    instance = tokenizer()
    instance.enable_padding(direction="left", pad_id=UNK, pad_token="[UNK]", pad_to_multiple_of=8)
    instance.enable_truncation(2, direction="left", stride=1)
    content = instance.to_str().encode()
    actual = text_spec(content, "text", 6)
    assert (actual.pad_id, actual.padding, actual.truncation) == (UNK, "left", "left")
    assert text_spec(TOKENIZER_FILE, "text", 6) == spec()
    row = TextEncoder(content, actual).row("the film was")
    assert row.tolist() == [UNK, UNK, CLS, token_id("the"), token_id("film"), token_id("was")]
    assert row.dtype == np.float32


def test_encoder_reports_truncation():
    encoder = TextEncoder(TOKENIZER_FILE, spec(3))
    assert [encoder.encoded(text)[1] for text in ("", "the film", "the film was")] == [
        False,
        False,
        True,
    ]


def test_library_panics_become_value_errors():
    class Panic(BaseException):
        """Imitates a panic in Rust."""

    Panic.__name__ = "PanicException"

    def panic():
        raise Panic("no entry found for key\nnote: run with")

    with pytest.raises(
        ValueError,
        match=r"^expected a tokenizer.json .* got something else: no entry found for key$",
    ):
        _run(panic, "")

    def interrupt():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _run(interrupt, "")


def test_concurrent_calls_encode_rows_identically():
    encoder = TextEncoder(TOKENIZER_FILE, spec(9))
    rows = texts(60)[0]
    expected = [encoder.row(text).tolist() for text in rows]
    with ThreadPoolExecutor(4) as pool:
        assert [row.tolist() for row in pool.map(encoder.row, rows * 5)] == expected * 5
    assert encoder.vocabulary == VOCABULARY == len(SPECIAL) + 22


def test_encoder_opens_no_connection(monkeypatch):
    def refuse(*_):
        raise AssertionError("unexpected connection")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    assert encode("the film")[0] == CLS


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "a tokenizer.json of Hugging Face's tokenizers, got something else: "),
        (b"\xff\xfe", "a tokenizer.json of Hugging Face's tokenizers, got something else: "),
        (b"[1, 2]", "a tokenizer.json of Hugging Face's tokenizers, got something else: "),
        (
            json.dumps({"model": {"type": "BPE"}}).encode(),
            "a tokenizer.json of Hugging Face's tokenizers, got ",
        ),
        (
            TOKENIZER_FILE[: len(TOKENIZER_FILE) // 2],
            "a tokenizer.json of Hugging Face's tokenizers, got something else: ",
        ),
        (
            Tokenizer(models.BPE(dropout=0.1)).to_str().encode(),
            "whose model has no dropout, got one of 0.1",
        ),
        (Tokenizer(models.BPE()).to_str().encode(), "a padding token with id 0"),
        (
            TOKENIZER_FILE.replace(b"[UNK]", b"[NONE]", 1),
            "a tokenizer.json of Hugging Face's tokenizers that takes every text",
        ),
    ],
)
def test_invalid_tokenizer_file_is_refused(content, message):
    with pytest.raises(ValueError, match=r"^expected ") as raised:
        TextEncoder(content, spec())
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_spec_without_room_for_text_or_padding_token_is_refused():
    with pytest.raises(ValueError, match="expected more tokens than 1 special tokens, got 1"):
        TextEncoder(TOKENIZER_FILE, spec(1))
    content = Tokenizer(models.BPE({"a": 0}, [])).to_str().encode()
    with pytest.raises(ValueError, match="expected a tokenizer with padding"):
        text_spec(content, "text", 6)


def test_text_that_is_too_long_or_not_unicode_is_refused():
    encoder = TextEncoder(TOKENIZER_FILE, spec())
    assert (
        encoder.bytes_for("é" * (MAX_TEXT_BYTES // 2), "inputs.0")
        == TOKENISING_BYTES * MAX_TEXT_BYTES
    )
    with pytest.raises(
        InvalidInput,
        match=r"^inputs\.0: expected text of at most 262144 bytes in UTF-8, got 262145",
    ):
        encoder.bytes_for("é" * (MAX_TEXT_BYTES // 2) + "e", "inputs.0")
    with pytest.raises(InvalidInput, match=r"^inputs\.0: expected Unicode text"):
        encoder.bytes_for("\ud800", "inputs.0")


@pytest.fixture(scope="module")
def call():
    with fresh_process() as call:
        yield call


NORMALISERS = {
    "none": lambda: None,
    "nfkc": normalizers.NFKC,
    "nfkd": normalizers.NFKD,
    "longer": lambda: normalizers.Replace("a", "bcde"),
}


@pytest.mark.parametrize(
    "text",
    [
        *("a", "\ufdfa", "\u4e2d"),
        *(pytest.param(text, marks=pytest.mark.slow) for text in ("a ", ".", "\uac01", "a\u0301")),
    ],
)
@pytest.mark.parametrize("normaliser", NORMALISERS)
@pytest.mark.parametrize("form", ["words", "bytes", "letters"])
def test_tokenising_memory_stays_within_the_estimate(call, form, normaliser, text):
    used, estimate = call(tokenize_memory, form, normaliser, text)
    assert used <= estimate + HEAP_BYTES


def tokenize_memory(form, normaliser, text):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    model, pre_tokenizer = {
        "words": (models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"), pre_tokenizers.Whitespace()),
        "bytes": (
            models.BPE({c: i for i, c in enumerate(alphabet)}, []),
            pre_tokenizers.ByteLevel(),
        ),
        "letters": (
            models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"),
            pre_tokenizers.Split(Regex("."), "isolated"),
        ),
    }[form]
    instance = Tokenizer(model)
    instance.pre_tokenizer = pre_tokenizer
    if (text_normaliser := NORMALISERS[normaliser]()) is not None:
        instance.normalizer = text_normaliser
    encoder, text = (
        TextEncoder(instance.to_str().encode(), spec()),
        text * (20_000 // len(text.encode())),
    )
    estimate = encoder.bytes_for(text, "inputs.0")
    return peak_growth_bytes(lambda: encoder.row(text)), estimate
