import dataclasses
import logging

import numpy as np
import onnx
import pyarrow as pa
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from pyarrow import parquet
from pyarrow.csv import write_csv
from torch import nn

from model_store.artifacts.manifest import ClassSpec
from tests.support.environment import working_in
from tests.support.recipes import get_recipe, write_recipe
from tests.support.refusals import assert_invalid
from tests.support.texts import VOCABULARY, tokenizer, write_reviews
from training.__main__ import main
from training.data import load
from training.data.tables import TextRows
from training.evaluation.outliers import OutlierSource, cross, random_ids
from training.recipe import COMBINED_SCORES, DENSITY_NAMES, FEATURE_DENSITIES
from training.versions import match_version

FACTORY = {"factory": f"{__name__}:small"}
TEXT = {"target": "label", "text": "text", "tokenizer": "tokenizer.json", "max_tokens": 12}


def small(shape, outputs):
    return nn.Sequential(nn.Embedding(20, 2), nn.Flatten(), nn.Linear(2 * shape[0], outputs))


def read(folder, source="csv:reviews.csv", **data):
    return load(get_recipe(source, **{**TEXT, **data}), folder)


def get_ids(texts, length=12):
    encoder = tokenizer()
    encoder.enable_truncation(length)
    encoder.enable_padding(length=length, pad_id=0)
    return np.array([encoder.encode(text).ids for text in texts], dtype=np.float32)


def test_text_columns_are_encoded_as_token_ids(tmp_path, caplog):
    write_reviews(tmp_path, 40)
    with caplog.at_level(logging.INFO):
        data = read(tmp_path, test_fraction=0.25, id="stars")
    assert "ignoring stars" not in caplog.text
    table = [line.split(",") for line in (tmp_path / "reviews.csv").read_text().splitlines()[1:]]
    expected = {tuple(get_ids([text])[0]): label for text, label, _ in table}
    actual = {tuple(x): data.classes[y] for x, y in zip(data.train.x, data.train.y, strict=True)}
    assert actual.items() <= expected.items()
    assert (len(data.train), len(data.test), data.shape, data.maximum) == (
        30,
        10,
        (12,),
        VOCABULARY - 1,
    )
    assert data.input.text.column == "text"
    assert data.tokenizer == (tmp_path / "tokenizer.json").read_bytes()
    with caplog.at_level(logging.INFO):
        assert read(tmp_path).digest() != read(tmp_path, max_tokens=5).digest()
    assert "of 40 texts to 5 tokens" in caplog.text
    assert "ignoring stars, because the model reads only 'text'" in caplog.text


def test_text_is_read_literally_and_missing_text_is_empty(tmp_path):
    tokenizer().save(str(tmp_path / "tokenizer.json"))
    texts = ["2024-01-01", "12", "NA", "", "good\n" * 30, 'bad, "so"', "1e5", "true"]
    cells = ['"' + text.replace('"', '""') + '"' for text in texts]
    (tmp_path / "a.csv").write_text(
        "text,label\n" + "".join(f"{cell},{i % 2}\n" for i, cell in enumerate(cells * 3))
    )
    column = [None if text in ("NA", "") else text for text in texts]
    table = {"text": column * 3, "label": [str(i % 2) for i in range(24)]}
    parquet.write_table(pa.table(table), tmp_path / "a.parquet")
    actual = [read(tmp_path, source) for source in ("csv:a.csv", "parquet:a.parquet")]
    assert np.array_equal(actual[0].train.x, actual[1].train.x)
    expected = {
        tuple(row) for row in get_ids(["" if text in ("NA", "") else text for text in texts])
    }
    assert {tuple(row) for row in np.concatenate([actual[0].train.x, actual[0].test.x])} == expected


def test_rows_of_left_out_classes_are_encoded_as_token_ids(tmp_path):
    write_reviews(tmp_path, 60)
    lines = (tmp_path / "reviews.csv").read_text().splitlines()
    lines[2::5] = [
        line.replace(",good,", ",odd,").replace(",bad,", ",odd,") for line in lines[2::5]
    ]
    (tmp_path / "reviews.csv").write_text("\n".join(lines) + "\n")
    data = read(tmp_path, leave_out=["odd"])
    assert data.classes == ("bad", "good")
    assert data.left_out.shape[1:] == (12,)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text": "words"}, "data.text: expected one of the columns"),
        ({"text": "label"}, "data.text: expected a column other than the target"),
        ({"tokenizer": "none.json"}, "data.tokenizer: expected an existing path"),
        ({"tokenizer": "reviews.csv"}, "data.tokenizer: expected a tokenizer.json of Hugging"),
        ({"max_tokens": 1}, "data.tokenizer: expected more tokens than 1 special tokens, got 1"),
        ({"source": "npz:a.npz", "target": None}, "data.text: expected no value, because `npz`"),
    ],
)
def test_invalid_text_options_are_rejected(tmp_path, changes, message):
    write_reviews(tmp_path, 40)
    assert_invalid(lambda: read(tmp_path, **{"source": "csv:reviews.csv", **changes}), message)


def test_too_long_text_is_rejected_with_its_row(tmp_path):
    write_reviews(tmp_path, 40)
    with (tmp_path / "reviews.csv").open("a") as file:
        file.write("x" * 300_000 + ",bad,0\n")
    assert_invalid(
        lambda: read(tmp_path),
        "column text, row ",
        "expected text of at most 262144 bytes",
        "got 300000",
    )


@pytest.mark.parametrize(
    "keys",
    [
        {"text": "text"},
        {"tokenizer": "t.json"},
        {"max_tokens": 5},
        {"text": "text", "tokenizer": "t.json", "columns": {"a": "numeric"}},
    ],
)
def test_conflicting_text_keys_are_rejected(keys):
    with pytest.raises(ValueError, match=r"no value with|only ignored columns"):
        get_recipe("csv:a.csv", **keys)


# Arrays


def write_ids(folder, dtype=np.int64, max_id=19, rows=40, **changes):
    x = np.random.default_rng(0).integers(0, max_id + 1, (rows, 5))
    x[0, 0] = max_id
    np.savez(folder / "ids.npz", x=changes.get("x", x.astype(dtype)), y=np.arange(rows) % 2)
    return x


@pytest.mark.parametrize("dtype", [np.int64, np.uint8, np.float32])
def test_integer_arrays_are_read_as_ids(tmp_path, dtype):
    x = write_ids(tmp_path, dtype)
    for vocabulary, maximum in (("auto", 19), (30, 29)):
        data = load(get_recipe("npz:ids.npz", vocabulary=vocabulary), tmp_path)
        assert (data.input.dtype, data.minimum, data.maximum) == ("int32", 0, maximum)
        assert data.train.x.dtype == (np.uint8 if dtype == np.uint8 else np.float32)
        all_rows = np.concatenate([data.train.x, data.test.x]).tolist()
        assert sorted(all_rows) == sorted(x.tolist())


@pytest.mark.parametrize(
    ("value", "vocabulary", "message"),
    [
        (20, 20, "expected an integer id from 0 to 19, got 20"),
        (-1, "auto", "expected an integer id from 0 to 16777215, got -1"),
        (1.5, "auto", "x_train.3.2: expected an integer id from 0 to 16777215, got 1.5"),
        (1 << 24, "auto", "got 16777216"),
    ],
)
def test_invalid_ids_are_rejected_with_their_position(tmp_path, value, vocabulary, message):
    x = np.random.default_rng(0).integers(0, 20, (40, 5)).astype(type(value))
    x[:, 2] = value
    write_ids(tmp_path, x=x)
    if value == 1.5:
        x[:, 2], x[3, 2] = 1, value
        y = np.arange(20) % 2
        np.savez(tmp_path / "ids.npz", x_train=x[:20], y_train=y, x_test=x[20:], y_test=y)
    assert_invalid(
        lambda: load(get_recipe("npz:ids.npz", vocabulary=vocabulary), tmp_path),
        message,
    )


def test_vocabulary_requires_an_npz_source(tmp_path):
    assert_invalid(
        lambda: load(get_recipe("digits", vocabulary="auto"), tmp_path),
        "data.vocabulary: expected an `npz:` source",
    )


# Outliers


@pytest.fixture
def data(tmp_path):
    write_reviews(tmp_path, 80)
    return read(tmp_path, test_fraction=0.5)


def test_random_ids_cover_the_vocabulary_and_keep_padding(data):
    rows = random_ids(data.input, np.concatenate([data.test.x] * 20), 0)
    is_padding = np.concatenate([data.test.x] * 20) == 0
    assert (rows[is_padding] == 0).all()
    assert set(rows[~is_padding].tolist()) == set(range(VOCABULARY))


def test_crossed_ids_combine_two_rows_of_different_classes(data):
    x, y = data.test.x, data.test.y
    rows = cross(x, y, data.input, 0)
    assert np.array_equal(rows == 0, x == 0)
    for row, original, label in zip(rows, x, y, strict=True):
        candidates = x[y != label]
        assert any(((row == original) | (row == candidate)).all() for candidate in candidates)
    assert (rows != x).any(axis=1).mean() > 0.5


def test_outlier_ids_are_read_from_arrays(data, tmp_path):
    np.savez(tmp_path / "other.npz", x=np.full((3, 12), VOCABULARY - 1))
    source = OutlierSource.parse("a=npz:other.npz", tmp_path)
    assert source.rows(data.input, 5, 0).shape == (3, 12)
    np.savez(tmp_path / "other.npz", x=np.full((3, 12), VOCABULARY))
    assert_invalid(
        lambda: source.rows(data.input, 5, 0),
        f"other.npz.0.0: expected an integer id from 0 to {VOCABULARY - 1}, got {VOCABULARY}",
    )
    assert_invalid(
        lambda: OutlierSource.parse("a=images:.", tmp_path).rows(data.input, 5, 0),
        "which are not images",
    )


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_outlier_texts_are_encoded_like_model_inputs(data, tmp_path, kind):
    texts = ["a zebra, and so", "", "it was good " * 20]
    table = pa.table({"text": texts, "more": ["1", "2", "3"]})
    (write_csv if kind == "csv" else parquet.write_table)(table, tmp_path / f"other.{kind}")
    source = OutlierSource.parse(f"other={kind}:other.{kind}", tmp_path)
    encoder = TextRows.load(get_recipe("csv:reviews.csv", **TEXT).data, tmp_path, None).encoder
    rows = source.rows(data.input, 5, 0, encoder)
    assert sorted(rows.tolist()) == sorted(get_ids(texts).tolist())
    assert len(source.rows(data.input, 2, 0, encoder)) == 2
    assert_invalid(
        lambda: source.rows(data.input, 5, 0), f"a model of columns or text for `{kind}:`"
    )
    (write_csv if kind == "csv" else parquet.write_table)(
        table.drop_columns("text"), tmp_path / f"reviews.{kind}"
    )
    textless_source = OutlierSource.parse(f"other={kind}:reviews.{kind}", tmp_path)
    assert_invalid(
        lambda: textless_source.rows(data.input, 5, 0, encoder),
        f"reviews.{kind}.text: expected a column with that name, got columns more",
    )


# Recipes


def test_flag_uses_no_input_density_for_ids():
    for task in ("classification", "regression"):
        combined = get_recipe("npz:ids.npz", task=task, vocabulary="auto").combined
        assert combined == [COMBINED_SCORES[task], "feature_neighbours"]
    from training.detectors import KINDS

    assert {name for name in DENSITY_NAMES if KINDS[name].space == "embedding"} == set(
        FEATURE_DENSITIES
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"network": {"hidden": [8]}}, "network: expected a factory"),
        (
            {"network": {**FACTORY, "standardise": {"mean": [0.0], "std": [1.0]}}},
            "network.standardise: expected no pixel statistics",
        ),
        ({"network": FACTORY, "augmentation": {"flip": ["vertical"]}}, "augmentation: expected"),
        (
            {"network": FACTORY, "serving": {"combined": ["entropy", "residual"]}},
            "serving.combined.1: expected no",
        ),
        (
            {"network": FACTORY, "data": {"vocabulary": 21}},
            "a module that accepts ids from 0 to 20 in rows of shape",
        ),
        ({"network": FACTORY, "data": {"vocabulary": 5}}, "expected an integer id from 0 to 4"),
    ],
)
def test_fit_rejects_options_that_conflict_with_ids(tmp_path, capsys, changes, message):
    write_ids(tmp_path)
    sizes = {"validation": 4, "reference": 4, "ranking": 4}
    data = {"source": "npz:ids.npz", "vocabulary": "auto", **sizes, **changes.pop("data", {})}
    path = write_recipe(tmp_path, data=data, **changes)
    with working_in(tmp_path):
        assert main(["fit", str(path), "--quiet"]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.strip().count("\n") == 0
    assert not (tmp_path / "models").exists()


def test_network_receives_int64_ids_in_row_shape(tmp_path):
    from tests.support.recipes import recipe_with
    from training.model import build

    inputs = []

    class Recorder(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = small((5,), 2)

        def forward(self, x):
            inputs.append((x.dtype, tuple(x.shape[1:])))
            return self.inner(x)

    global build_recorder

    def build_recorder(shape, outputs):
        return Recorder()

    for method in ("bhn-realnvp", "mle", "ensemble", "dropout", "bbb-gaussian"):
        network, posterior = (
            {"factory": f"{__name__}:build_recorder"},
            {"input_rate": 0.1} if method == "dropout" else {},
        )
        data = {"source": "npz:x", "vocabulary": "auto"}
        settings = recipe_with(method=method, data=data, network=network, posterior=posterior)
        model = build(settings, (5,), 2, torch.tensor([[0.0, 1, 2, 3, 19]]), largest_id=19)
        model.predict(
            torch.tensor([[0.0, 1, 2, 3, 19]]), torch.zeros(2, model.posterior.noise_dimension)
        )
    assert set(inputs) == {(torch.int64, (5,))}


@pytest.mark.usefixtures("fits")
def test_encoder_embeds_ids_and_must_accept_all_of_them(tmp_path):
    from tests.support.recipes import recipe_with
    from training.fitting.encoding import encoder_graph, make_encoding

    write_reviews(tmp_path, 60)
    network = {"hidden": [], "encoder": "tests.support.texts:MeanEmbedding"}
    settings = recipe_with(data={"source": "csv:reviews.csv", **TEXT}, network=network)
    data = load(settings, tmp_path)
    graph = encoder_graph(settings, data)
    encoding = make_encoding(graph, data, data.train, tmp_path, None)
    x = data.train.x[:5]
    is_token = (x != 0)[:, :, None]
    (embedding,) = [
        numpy_helper.to_array(tensor)
        for tensor in onnx.load(encoding.path).graph.initializer
        if tuple(tensor.dims) == (VOCABULARY, 8)
    ]
    expected = (embedding[x.astype(int)] * is_token).sum(1) / is_token.sum(1)
    np.testing.assert_allclose(encoding.encoder(x), expected, atol=1e-5)
    larger_data = dataclasses.replace(data, maximum=VOCABULARY + 5.0)
    assert_invalid(
        lambda: make_encoding(graph, larger_data, data.train, tmp_path, None),
        f"network.encoder: expected an encoder that accepts ids from 0 to {VOCABULARY + 5}",
    )


@pytest.mark.usefixtures("fits")
def test_onnx_text_encoder_receives_the_attention_mask(tmp_path):
    from tests.support.recipes import recipe_with
    from training.fitting.encoding import encoder_graph, make_encoding

    write_reviews(tmp_path, 60)
    padded = tokenizer()
    padded.enable_padding(pad_id=padded.token_to_id("[UNK]"), pad_token="[UNK]")
    padded.save(str(tmp_path / "padded.json"))
    axes, names = ["rows", 12], ("input_ids", "attention_mask")
    inputs = [helper.make_tensor_value_info(name, TensorProto.INT64, axes) for name in names]
    nodes = [
        helper.make_node("Mul", ["input_ids", "attention_mask"], ["kept"]),
        helper.make_node("Concat", ["kept", "attention_mask"], ["both"], axis=1),
    ]
    output = helper.make_tensor_value_info("both", TensorProto.INT64, ["rows", 24])
    graph = helper.make_graph(nodes, "masked", inputs, [output])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.save(model, tmp_path / "masked.onnx")
    network = {"hidden": [4], "encoder": f"onnx:{tmp_path / 'masked.onnx'}"}
    section = {"source": "csv:reviews.csv", **TEXT, "tokenizer": "padded.json"}
    settings = recipe_with(data=section, network=network)
    assert settings.is_standardised
    assert set(settings.combined) > {"residual", "mahalanobis", "cosine_neighbours"}
    data = load(settings, tmp_path)
    graph = encoder_graph(settings, data)
    encoding = make_encoding(graph, data, data.train, tmp_path, None)
    x = data.train.x[:9]
    is_token = x != tokenizer().token_to_id("[UNK]")
    assert not is_token.all()
    assert np.array_equal(encoding.encoder(x), np.concatenate([x * is_token, is_token], axis=1))


def test_ids_above_the_version_maximum_are_rejected(tmp_path, published):
    write_ids(tmp_path)
    data = load(get_recipe("npz:ids.npz", vocabulary="auto"), tmp_path)
    manifest = published.manifest("m", "1")
    for largest in (19.0, 18.0):
        spec = data.input.model_copy(update={"maximum": largest})
        output = ClassSpec(classes=data.classes)
        variant = manifest.model_copy(update={"input": spec, "output": output})
        if largest == 19.0:
            assert match_version(data, variant, "--data").digest() == data.digest()
        else:
            message = "--data: expected ids up to 18, the largest of m version 1, got 19"
            assert_invalid(lambda variant=variant: match_version(data, variant, "--data"), message)
