import gzip
import io
import zipfile

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import parquet

from model_store.artifacts.manifest import CategoricalColumn, InputSpec, NumericColumn
from tests.support.refusals import assert_invalid
from training.evaluation.outliers import OutlierSource, gaussian, generated_sets, rotate, uniform

GREY = InputSpec(shape=(6, 6), minimum=0.0, maximum=16.0)
COLOUR = InputSpec(shape=(3, 4, 6), minimum=-1.0, maximum=1.0)


def test_noise_has_shape_and_range_of_model_input():
    spec = InputSpec(shape=(5, 4), minimum=-3.0, maximum=7.0)
    flat, normal = uniform(spec, 2000, 0), gaussian(spec, 2000, 0)
    assert flat.shape == normal.shape == (2000, 20)
    assert flat.min() >= -3
    assert flat.max() <= 7
    # Each tolerance is six standard errors of 40,000 numbers.
    assert abs(flat.mean() - 2) < 6 * 10 / 12**0.5 / 200
    assert abs(normal.mean() + 3) < 6 * 10 / 200
    assert abs(normal.std() - 10) < 6 * 10 / (2 * 40_000) ** 0.5
    assert np.array_equal(uniform(spec, 3, 1), uniform(spec, 3, 1))
    assert not np.array_equal(uniform(spec, 3, 1), uniform(spec, 3, 2))


def pattern(height, width):
    """Create an image that is white on the left and black on the right."""
    image = np.zeros((height, width), dtype=np.uint8)
    image[:, : width // 2] = 255
    return image


def png(image):
    content = io.BytesIO()
    Image.fromarray(image).save(content, format="PNG")
    return content.getvalue()


@pytest.mark.parametrize("spec", [GREY, COLOUR])
def test_images_convert_to_shape_and_range_of_model_input(tmp_path, spec):
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as file:
        for i in range(5):
            file.writestr(f"test/a/{i}.png", png(np.repeat(pattern(32, 32)[..., None], 3, axis=2)))
    source = OutlierSource.parse("other=images:other.zip", tmp_path)
    rows = source.rows(spec, 3, 0).reshape(3, *spec.shape)
    width = spec.shape[-1] // 2 - 1
    assert (rows[..., :width] == spec.maximum).all()
    assert (rows[..., -width:] == spec.minimum).all()


def test_rows_are_sampled_from_larger_source_by_seed(tmp_path):
    x = np.arange(50 * 36, dtype=np.float32).reshape(50, 6, 6)
    np.savez(tmp_path / "rows.npz", x=x)
    source = OutlierSource.parse("other=npz:rows.npz", tmp_path)
    selected = source.rows(GREY, 8, 0)
    assert len({*selected[:, 0].tolist()}) == 8
    assert {*selected[:, 0].tolist()} < {*x[:, 0, 0].tolist()}
    assert np.array_equal(source.rows(GREY, 8, 0), selected)
    assert not np.array_equal(source.rows(GREY, 8, 1), selected)


def test_invalid_sources_are_named_in_errors(tmp_path):
    np.savez(tmp_path / "narrow.npz", x=np.zeros((3, 5)))
    np.savez(tmp_path / "nan.npz", x=np.full((3, 36), np.nan))
    for text in ("notmnist", "=npz:a", "a b=npz:a", "a=uci:b", "../a=npz:b", "a=npz:"):
        assert_invalid(
            lambda text=text: OutlierSource.parse(text, tmp_path), "--outliers", repr(text)
        )
    for name, *messages in (
        ("npz:narrow.npz", "(N, 6, 6)", "(3, 5)"),
        ("npz:nan.npz", "x", "finite"),
        ("npz:none.npz", "--outliers", "'none.npz', which is neither in"),
        ("images:none", "--outliers", "'none', which is neither in"),
    ):
        assert_invalid(
            lambda name=name: OutlierSource.parse(f"a={name}", tmp_path).rows(GREY, 5, 0), *messages
        )
    table = InputSpec(shape=(9,), minimum=0.0, maximum=1.0)
    assert_invalid(
        lambda: OutlierSource.parse("a=images:.", tmp_path).rows(table, 5, 0), "npz", "(9,)"
    )


def test_table_files_are_encoded_with_model_columns(tmp_path):
    columns = (
        NumericColumn(name="width", mean=1.0, std=2.0, indicator=True),
        CategoricalColumn(name="city", categories=("Oslo", "Rome")),
    )
    spec = InputSpec(shape=(5,), minimum=-9.0, maximum=9.0, columns=columns)
    text = "city,more,width\nRome,a,3\nParis,b,\nOslo,c,2e3\n"
    (tmp_path / "odd.csv").write_text(text)
    (tmp_path / "odd.csv.gz").write_bytes(gzip.compress(text.encode()))
    table = {"city": ["Rome", "Paris", "Oslo"], "width": [3.0, None, 2e3]}
    parquet.write_table(pa.table(table), tmp_path / "odd.parquet")
    rows = [[1, 0, 0, 1, 0], [0, 1, 0, 0, 1], [999.5, 0, 1, 0, 0]]
    for source in ("csv:odd.csv", "csv:odd.csv.gz", "parquet:odd.parquet"):
        actual = OutlierSource.parse(f"odd={source}", tmp_path).rows(spec, 5, 0)
        assert sorted(actual.tolist()) == sorted(rows)
        assert len(OutlierSource.parse(f"odd={source}", tmp_path).rows(spec, 2, 0)) == 2
    for content, *messages in (
        ("city\nRome\n", "odd.csv", "width"),
        ("city,width\nRome,wide\n", "odd.csv.0.width", "number"),
    ):
        (tmp_path / "odd.csv").write_text(content)
        assert_invalid(
            lambda: OutlierSource.parse("odd=csv:odd.csv", tmp_path).rows(spec, 5, 0), *messages
        )


def get_rows(spec, n=40):
    generator = np.random.default_rng(0)
    return generator.uniform(spec.minimum, spec.maximum, (n, int(np.prod(spec.shape)))).astype(
        np.float32
    )


@pytest.mark.parametrize("spec", [GREY, COLOUR])
def test_near_sets_stay_in_range_depend_on_seed_and_change_every_row(spec):
    x, y = get_rows(spec), np.arange(40) % 3
    sets, repeated, reseeded = (generated_sets(spec, x, y, True, seed) for seed in (0, 0, 1))
    assert set(sets) == {"uniform", "gaussian", "mixed", "rotated"}
    for name in ("mixed", "rotated"):
        rows = sets[name]
        assert rows.shape == x.shape, name
        assert rows.dtype == np.float32, name
        assert rows.min() >= spec.minimum, name
        assert rows.max() <= spec.maximum, name
        assert (rows != x).any(axis=1).all(), name
        assert np.array_equal(rows, repeated[name]), name
    assert not np.array_equal(sets["mixed"], reseeded["mixed"])


def test_mixed_rows_average_rows_of_two_classes():
    y = np.array([0, 1, 1, 2])
    x = np.eye(4, 36, dtype=np.float32)
    partners = 2 * generated_sets(GREY, x, y, True, 0)["mixed"] - x
    assert (y[partners.argmax(axis=1)] != y).all()
    assert np.array_equal(partners.sum(axis=1), np.ones(4))


def test_images_rotate_by_quarter_turn():
    image = pattern(6, 6).astype(np.float32).reshape(1, 36)
    rotated = rotate(image, GREY).reshape(6, 6)
    assert np.array_equal(rotated, np.repeat([[0], [255]], 3, axis=0) * np.ones((1, 6)))
