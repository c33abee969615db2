import json
import socket
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from model_store.artifacts.manifest import TextSpec
from model_store.errors import InvalidInput
from model_store.sources.text import MAX_TEXT_BYTES, TOKENISING_BYTES, TextEncoder, _run, text_spec
from tests.support.process import HEAP_BYTES, measuring, taken_bytes
from tests.support.texts import SPECIAL, VOCABULARY, texts, tokenizer

FILE = tokenizer().to_str().encode()
CLS, UNK, PAD = 2, 1, 0


def spec(max_tokens=6, **changes):
    return TextSpec(column="text", max_tokens=max_tokens, pad_id=PAD, **changes)


def ids(text, **changes):
    return TextEncoder(FILE, spec(**changes)).row(text).tolist()


def word(name):
    return tokenizer().token_to_id(name)


@pytest.mark.parametrize(
    ("text", "changes", "expected"),
    [
        ("the film", {}, [CLS, word("the"), word("film"), PAD, PAD, PAD]),
        ("the film", {"padding": "left"}, [PAD, PAD, PAD, CLS, word("the"), word("film")]),
        ("", {}, [CLS, PAD, PAD, PAD, PAD, PAD]),
        ("the zebra", {}, [CLS, word("the"), UNK, PAD, PAD, PAD]),
        ("a film was very good", {"max_tokens": 4}, [CLS, *map(word, ("a", "film", "was"))]),
        (
            "a film was very good",
            {"max_tokens": 4, "truncation": "left"},
            [CLS, *map(word, ("was", "very", "good"))],
        ),
    ],
)
def test_text_is_truncated_and_padded_as_the_spec_says(text, changes, expected):
    assert ids(text, **changes) == expected


def test_what_the_file_says_of_padding_and_truncation_is_the_default_and_no_more():
    created = tokenizer()
    created.enable_padding(direction="left", pad_id=UNK, pad_token="[UNK]", pad_to_multiple_of=8)
    created.enable_truncation(2, direction="left", stride=1)
    content = created.to_str().encode()
    actual = text_spec(content, "text", 6)
    assert (actual.pad_id, actual.padding, actual.truncation) == (UNK, "left", "left")
    assert text_spec(FILE, "text", 6) == spec()
    row = TextEncoder(content, actual).row("the film was")
    assert row.tolist() == [UNK, UNK, CLS, word("the"), word("film"), word("was")]
    assert row.dtype == np.float32


def test_it_is_said_whether_text_is_cut():
    encoder = TextEncoder(FILE, spec(3))
    assert [encoder.encoded(text)[1] for text in ("", "the film", "the film was")] == [
        False,
        False,
        True,
    ]


def test_whatever_the_library_raises_is_an_error_of_the_file():
    class Panic(BaseException):
        """As that of a panic in Rust."""

    Panic.__name__ = "PanicException"

    def panics():
        raise Panic("no entry found for key\nnote: run with")

    with pytest.raises(
        ValueError,
        match=r"^expected a tokenizer.json .* got something else: no entry found for key$",
    ):
        _run(panics, "")

    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _run(interrupted, "")


def test_rows_are_the_same_whoever_else_asks():
    encoder = TextEncoder(FILE, spec(9))
    rows = texts(60)[0]
    alone = [encoder.row(text).tolist() for text in rows]
    with ThreadPoolExecutor(4) as pool:
        assert [row.tolist() for row in pool.map(encoder.row, rows * 5)] == alone * 5
    assert encoder.vocabulary == VOCABULARY == len(SPECIAL) + 22


def test_nothing_is_fetched(monkeypatch):
    def refuse(*_):
        raise AssertionError("a connection")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    assert ids("the film")[0] == CLS


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "a tokenizer.json of Hugging Face's tokenizers, got something else: "),
        (b"\xff\xfe", "a tokenizer.json of Hugging Face's tokenizers, got something else: "),
        (b"[1, 2]", "a tokenizer.json of Hugging Face's tokenizers, got something else: "),
        (
            json.dumps({"model": {"type": "BPE"}}).encode(),
            "a tokenizer.json of Hugging Face's tokenizers, got ",
        ),
        (
            FILE[: len(FILE) // 2],
            "a tokenizer.json of Hugging Face's tokenizers, got something else: ",
        ),
        (
            Tokenizer(models.BPE(dropout=0.1)).to_str().encode(),
            "whose model has no dropout, got one of 0.1",
        ),
        (Tokenizer(models.BPE()).to_str().encode(), "a padding token with id 0"),
        (
            FILE.replace(b"[UNK]", b"[NONE]", 1),
            "a tokenizer.json of Hugging Face's tokenizers that takes every text",
        ),
    ],
)
def test_a_file_that_is_no_such_tokenizer_is_refused(content, says):
    with pytest.raises(ValueError, match=r"^expected ") as refused:
        TextEncoder(content, spec())
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_row_has_room_for_text_and_a_padding_token_is_known():
    with pytest.raises(ValueError, match="expected more tokens than 1 special tokens, got 1"):
        TextEncoder(FILE, spec(1))
    content = Tokenizer(models.BPE({"a": 0}, [])).to_str().encode()
    with pytest.raises(ValueError, match="expected a tokenizer with padding"):
        text_spec(content, "text", 6)


def test_text_that_is_too_long_or_none_is_refused():
    encoder = TextEncoder(FILE, spec())
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
    with measuring() as call:
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
def test_tokenising_takes_no_more_than_is_counted(call, form, normaliser, text):
    used, counted = call(tokenize_memory, form, normaliser, text)
    assert used <= counted + HEAP_BYTES


def tokenize_memory(form, normaliser, text):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    model, before = {
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
    created = Tokenizer(model)
    created.pre_tokenizer = before
    if (of_text := NORMALISERS[normaliser]()) is not None:
        created.normalizer = of_text
    encoder, text = (
        TextEncoder(created.to_str().encode(), spec()),
        text * (20_000 // len(text.encode())),
    )
    counted = encoder.bytes_for(text, "inputs.0")
    return taken_bytes(lambda: encoder.row(text)), counted
