import numpy as np
import pytest

from model_store.artifacts.manifest import CategoricalColumn, InputSpec, NumericColumn, TimeColumn
from model_store.sources.columns import encode
from training.evaluation.outliers import cross, even_rows, takes_even_rows

COLUMNS = (
    NumericColumn(name="age", mean=50.0, std=10.0, indicator=True),
    NumericColumn(name="bit", mean=0.25, std=0.5, indicator=False),
    CategoricalColumn(name="city", categories=("Oslo", "Rome", "unused")),
    TimeColumn(name="day", mean=1e9, std=1e6, cycles=("week",), indicator=True),
)
SPEC = InputSpec(shape=(2 + 1 + 4 + 4,), minimum=-5, maximum=5, columns=COLUMNS)


def create_rows(count=200):
    random = np.random.default_rng(0)
    values = {
        "age": np.where(random.random(count) < 0.2, np.nan, random.normal(50, 10, count)),
        "bit": random.integers(0, 2, count).astype(float),
        "city": random.choice(["Oslo", "Rome"], count, p=[0.9, 0.1]).tolist(),
        "day": np.where(random.random(count) < 0.2, np.nan, 1e9 + 1e6 * random.random(count)),
    }
    return encode(COLUMNS, values)


def test_even_rows_spread_evenly_over_valid_values_of_each_column():
    x = create_rows()
    created = even_rows(SPEC, x, 4000, 7)
    assert created.shape == (4000, 11)
    age = created[:, :2]
    assert x[x[:, 1] == 0, 0].min() <= age[:, 0].min() < age[:, 0].max() <= x[:, 0].max()
    assert abs(np.mean(age[:, 0] < (age[:, 0].min() + age[:, 0].max()) / 2) - 0.5) < 0.05
    assert (age[:, 1] == 0).all()
    assert {*np.unique(created[:, 2])} == {*np.unique(x[:, 2])}
    assert abs(np.mean(created[:, 2] == created[:, 2].max()) - 0.5) < 0.05
    assert (created[:, 3:7].sum(axis=1) == 1).all()
    assert np.abs(created[:, 3:5].mean(axis=0) - 0.5).max() < 0.05
    assert (created[:, 5:7] == 0).all()  # Unused categories are never generated.
    seconds = created[:, 7].astype(np.float64) * 1e6 + 1e9
    assert np.allclose(encode(COLUMNS[3:], {"day": seconds})[:, 1:3], created[:, 8:10], atol=2e-3)
    assert np.array_equal(created, even_rows(SPEC, x, 4000, 7))


def test_even_rows_apply_to_tables_and_binary_columns_but_not_images():
    image, flat = (
        InputSpec(shape=(2, 3), minimum=0, maximum=1),
        InputSpec(shape=(6,), minimum=0, maximum=1),
    )
    random = np.random.default_rng(0)
    continuous, bits = random.random((50, 6)), random.integers(0, 2, (50, 6))
    assert takes_even_rows(SPEC, create_rows())
    assert not takes_even_rows(image, bits)
    assert not takes_even_rows(flat, continuous)
    assert takes_even_rows(flat, bits)
    assert {*np.unique(even_rows(flat, bits, 30, 0))} == {0.0, 1.0}
    mixed = np.concatenate([continuous[:, :3], bits[:, 3:]], axis=1)
    created = even_rows(flat, mixed, 30, 0)
    assert {*np.unique(created[:, 3:])} == {0.0, 1.0}
    assert created[:, 0].min() >= np.float32(mixed[:, 0].min())


def test_crossed_rows_take_each_column_from_one_of_two_rows():
    x, y = create_rows(60), np.arange(60) % 3
    created = cross(x, y, SPEC, 0)
    widths = np.cumsum([2, 1, 4])
    is_unchanged = [
        np.all(a == b, axis=1)
        for a, b in zip(*(np.split(r, widths, axis=1) for r in (created, x)), strict=True)
    ]
    assert 0.3 < np.mean(is_unchanged) < 0.95
    for row, part in zip(created, np.split(created, 60), strict=True):
        assert row[3:7].sum() == pytest.approx(1)
        assert any(np.array_equal(part[0, 7:], candidate[7:]) for candidate in x)
    assert len(cross(x, np.zeros(60, dtype=np.int64), SPEC, 0)) == 0
