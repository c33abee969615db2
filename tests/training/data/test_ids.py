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
from tests.support.refusals import refused
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
    created = tokenizer()
    created.enable_truncation(length)
    created.enable_padding(length=length, pad_id=0)
    return np.array([created.encode(text).ids for text in texts], dtype=np.float32)


def test_a_column_of_text_becomes_rows_of_ids(tmp_path, caplog):
    write_reviews(tmp_path, 40)
    with caplog.at_level(logging.INFO):
        data = read(tmp_path, test_fraction=0.25, id="stars")
    assert "ignoring stars" not in caplog.text
    table = [line.split(",") for line in (tmp_path / "reviews.csv").read_text().splitlines()[1:]]
    rows = {tuple(get_ids([text])[0]): label for text, label, _ in table}
    actual = {tuple(x): data.classes[y] for x, y in zip(data.train.x, data.train.y, strict=True)}
    assert actual.items() <= rows.items()
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


def test_text_is_read_as_it_is_written_and_none_is_empty(tmp_path):
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


def test_classes_left_out_are_kept_aside_as_ids(tmp_path):
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
    ("changes", "says"),
    [
        ({"text": "words"}, "data.text: expected one of the columns"),
        ({"text": "label"}, "data.text: expected a column other than the target"),
        ({"tokenizer": "none.json"}, "data.tokenizer: expected a tokenizer.json at "),
        ({"tokenizer": "reviews.csv"}, "data.tokenizer: expected a tokenizer.json of Hugging"),
        ({"max_tokens": 1}, "data.tokenizer: expected more tokens than 1 special tokens, got 1"),
        ({"source": "npz:a.npz", "target": None}, "data.text: expected no value, because `npz`"),
    ],
)
def test_what_text_cannot_be_read_by_is_refused_in_one_line(tmp_path, changes, says):
    write_reviews(tmp_path, 40)
    refused(lambda: read(tmp_path, **{"source": "csv:reviews.csv", **changes}), says)


def test_a_text_that_is_too_long_is_refused_by_its_row(tmp_path):
    write_reviews(tmp_path, 40)
    with (tmp_path / "reviews.csv").open("a") as file:
        file.write("x" * 300_000 + ",bad,0\n")
    refused(
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
def test_keys_that_do_not_go_together_are_refused(keys):
    with pytest.raises(ValueError, match=r"no value with|only ignored columns"):
        get_recipe("csv:a.csv", **keys)


# Arrays


def write_ids(folder, dtype=np.int64, largest=19, rows=40, **changes):
    x = np.random.default_rng(0).integers(0, largest + 1, (rows, 5))
    x[0, 0] = largest
    np.savez(folder / "ids.npz", x=changes.get("x", x.astype(dtype)), y=np.arange(rows) % 2)
    return x


@pytest.mark.parametrize("dtype", [np.int64, np.uint8, np.float32])
def test_arrays_of_integers_are_rows_of_ids(tmp_path, dtype):
    x = write_ids(tmp_path, dtype)
    for vocabulary, maximum in (("auto", 19), (30, 29)):
        data = load(get_recipe("npz:ids.npz", vocabulary=vocabulary), tmp_path)
        assert (data.input.dtype, data.minimum, data.maximum) == ("int32", 0, maximum)
        assert data.train.x.dtype == (np.uint8 if dtype == np.uint8 else np.float32)
        together = np.concatenate([data.train.x, data.test.x]).tolist()
        assert sorted(together) == sorted(x.tolist())


@pytest.mark.parametrize(
    ("value", "vocabulary", "says"),
    [
        (20, 20, "expected an integer id from 0 to 19, got 20"),
        (-1, "auto", "expected an integer id from 0 to 16777215, got -1"),
        (1.5, "auto", "x_train.3.2: expected an integer id from 0 to 16777215, got 1.5"),
        (1 << 24, "auto", "got 16777216"),
    ],
)
def test_numbers_that_are_no_ids_are_refused_by_their_row(tmp_path, value, vocabulary, says):
    x = np.random.default_rng(0).integers(0, 20, (40, 5)).astype(type(value))
    x[:, 2] = value
    write_ids(tmp_path, x=x)
    if value == 1.5:
        x[:, 2], x[3, 2] = 1, value
        y = np.arange(20) % 2
        np.savez(tmp_path / "ids.npz", x_train=x[:20], y_train=y, x_test=x[20:], y_test=y)
    refused(
        lambda: load(get_recipe("npz:ids.npz", vocabulary=vocabulary), tmp_path),
        says,
    )


def test_other_sources_have_no_ids(tmp_path):
    refused(
        lambda: load(get_recipe("digits", vocabulary="auto"), tmp_path),
        "data.vocabulary: expected an `npz:` source",
    )


# What stands for noise


@pytest.fixture
def data(tmp_path):
    write_reviews(tmp_path, 80)
    return read(tmp_path, test_fraction=0.5)


def test_random_ids_are_of_all_that_there_are_and_leave_padding(data):
    rows = random_ids(data.input, np.concatenate([data.test.x] * 20), 0)
    is_padding = np.concatenate([data.test.x] * 20) == 0
    assert (rows[is_padding] == 0).all()
    assert set(rows[~is_padding].tolist()) == set(range(VOCABULARY))


def test_crossed_ids_are_of_two_rows_of_different_classes(data):
    x, y = data.test.x, data.test.y
    rows = cross(x, y, data.input, 0)
    assert np.array_equal(rows == 0, x == 0)
    for row, custom, label in zip(rows, x, y, strict=True):
        rest = x[y != label]
        assert any(((row == custom) | (row == other)).all() for other in rest)
    assert (rows != x).any(axis=1).mean() > 0.5


def test_other_rows_of_ids_are_those_of_arrays(data, tmp_path):
    np.savez(tmp_path / "other.npz", x=np.full((3, 12), VOCABULARY - 1))
    source = OutlierSource.parse("a=npz:other.npz", tmp_path)
    assert source.rows(data.input, 5, 0).shape == (3, 12)
    np.savez(tmp_path / "other.npz", x=np.full((3, 12), VOCABULARY))
    refused(
        lambda: source.rows(data.input, 5, 0),
        f"other.npz.0.0: expected an integer id from 0 to {VOCABULARY - 1}, got {VOCABULARY}",
    )
    refused(
        lambda: OutlierSource.parse("a=images:x", tmp_path).rows(data.input, 5, 0),
        "which are not images",
    )


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_other_texts_are_read_as_the_model_reads_text(data, tmp_path, kind):
    texts = ["a zebra, and so", "", "it was good " * 20]
    table = pa.table({"text": texts, "more": ["1", "2", "3"]})
    (write_csv if kind == "csv" else parquet.write_table)(table, tmp_path / f"other.{kind}")
    source = OutlierSource.parse(f"other={kind}:other.{kind}", tmp_path)
    encoder = TextRows.load(get_recipe("csv:reviews.csv", **TEXT).data, tmp_path, None).encoder
    rows = source.rows(data.input, 5, 0, encoder)
    assert sorted(rows.tolist()) == sorted(get_ids(texts).tolist())
    assert len(source.rows(data.input, 2, 0, encoder)) == 2
    refused(lambda: source.rows(data.input, 5, 0), f"a model of columns or text for `{kind}:`")
    elsewhere = OutlierSource.parse(f"other={kind}:reviews.{kind}", tmp_path)
    (write_csv if kind == "csv" else parquet.write_table)(
        table.drop_columns("text"), tmp_path / f"reviews.{kind}"
    )
    refused(
        lambda: elsewhere.rows(data.input, 5, 0, encoder),
        f"reviews.{kind}.text: expected a column with that name, got columns more",
    )


# Recipes


def test_the_flag_looks_at_no_density_of_ids():
    for task in ("classification", "regression"):
        combined = get_recipe("npz:ids.npz", task=task, vocabulary="auto").combined
        assert combined == [COMBINED_SCORES[task], "feature_neighbours"]
    from training.detectors import KINDS

    assert {name for name in DENSITY_NAMES if KINDS[name].space == "embedding"} == set(
        FEATURE_DENSITIES
    )


@pytest.mark.parametrize(
    ("changes", "says"),
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
def test_what_does_not_go_with_ids_ends_a_fit_before_it_begins(tmp_path, capsys, changes, says):
    write_ids(tmp_path)
    sizes = {"validation": 4, "reference": 4, "ranking": 4}
    data = {"source": "npz:ids.npz", "vocabulary": "auto", **sizes, **changes.pop("data", {})}
    path = write_recipe(tmp_path, data=data, **changes)
    with working_in(tmp_path):
        assert main(["fit", str(path), "--quiet"]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.strip().count("\n") == 0
    assert not (tmp_path / "models").exists()


def test_the_network_gets_integers_in_the_rows_shape(tmp_path):
    from tests.support.recipes import recipe_with
    from training.model import build

    retained = []

    class Watching(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = small((5,), 2)

        def forward(self, x):
            retained.append((x.dtype, tuple(x.shape[1:])))
            return self.inner(x)

    global watched

    def watched(shape, outputs):
        return Watching()

    for method in ("bhn-realnvp", "mle", "ensemble", "dropout", "bbb-gaussian"):
        network, posterior = (
            {"factory": f"{__name__}:watched"},
            {"input_rate": 0.1} if method == "dropout" else {},
        )
        data = {"source": "npz:x", "vocabulary": "auto"}
        settings = recipe_with(method=method, data=data, network=network, posterior=posterior)
        model = build(settings, (5,), 2, torch.tensor([[0.0, 1, 2, 3, 19]]), largest_id=19)
        model.predict(
            torch.tensor([[0.0, 1, 2, 3, 19]]), torch.zeros(2, model.posterior.noise_dimension)
        )
    assert set(retained) == {(torch.int64, (5,))}


@pytest.mark.usefixtures("fits")
def test_an_encoder_takes_ids_and_all_of_them(tmp_path):
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
    extra = dataclasses.replace(data, maximum=VOCABULARY + 5.0)
    refused(
        lambda: make_encoding(graph, extra, data.train, tmp_path, None),
        f"network.encoder: expected an encoder that accepts ids from 0 to {VOCABULARY + 5}",
    )


@pytest.mark.usefixtures("fits")
def test_an_onnx_encoder_of_text_is_told_what_is_padding(tmp_path):
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


def test_rows_with_larger_ids_than_a_version_takes_are_refused(tmp_path, published):
    write_ids(tmp_path)
    data = load(get_recipe("npz:ids.npz", vocabulary="auto"), tmp_path)
    manifest = published.manifest("m", "1")
    for largest in (19.0, 18.0):
        spec = data.input.model_copy(update={"maximum": largest})
        output = ClassSpec(classes=data.classes)
        taken = manifest.model_copy(update={"input": spec, "output": output})
        if largest == 19.0:
            assert match_version(data, taken, "--data").digest() == data.digest()
        else:
            says = "--data: expected ids up to 18, the largest of m version 1, got 19"
            refused(lambda taken=taken: match_version(data, taken, "--data"), says)
