import numpy as np
import pytest

from model_store.inference.training_rows import BLOCK_NUMBERS, TrainingRows


def make_rows(dtype=np.float32, count=40, numbers=5):
    x = np.random.default_rng(0).integers(0, 256, (count, numbers)).astype(dtype)
    scale = np.linspace(1, 3, numbers, dtype=np.float32)
    names = tuple(f"ü{i}" if i else "" for i in range(count))
    return TrainingRows(x, scale, names, np.arange(count, dtype=np.float64))


@pytest.mark.parametrize("dtype", [np.float32, np.uint8])
@pytest.mark.parametrize("numbers", [5, BLOCK_NUMBERS // 7])
def test_nearest_rows_match_brute_force(dtype, numbers):
    rows = make_rows(dtype, numbers=numbers)
    row = rows.x[7].astype(np.float32) + np.float32(0.25)
    expected = np.sqrt(np.mean(np.square((rows.x.astype(float) - row) / rows.scale), axis=1))
    ids, distances = rows.nearest(row, 3)
    assert ids == [rows.ids[i] for i in np.argsort(expected)[:3]]
    assert ids[0] == "ü7"
    assert distances == pytest.approx(np.sort(expected)[:3])


def test_row_has_distance_0_to_itself_and_k_can_exceed_row_count():
    rows = make_rows(count=2)
    ids, distances = rows.nearest(rows.x[1], 5)
    assert ids == ["ü1", ""]
    assert distances[0] == 0.0


def test_rows_round_trip_through_tensors():
    rows = make_rows()
    restored = TrainingRows.from_tensors(rows.tensors(), 5)
    assert restored.ids == rows.ids
    assert np.array_equal(restored.x, rows.x)
    assert np.array_equal(restored.scale, rows.scale)
    assert np.array_equal(restored.labels, rows.labels)


@pytest.mark.parametrize(
    ("name", "invalid"),
    [
        ("x", np.zeros((40, 4), dtype=np.float32)),
        ("x", np.zeros((0, 5), dtype=np.float32)),
        ("x", np.full((40, 5), np.nan, dtype=np.float32)),
        ("x", np.zeros((40, 5), dtype=np.float64)),
        ("scale", np.zeros(5, dtype=np.float32)),
        ("scale", np.ones(4, dtype=np.float32)),
        ("ids", np.full(40, 255, dtype=np.uint8)),
        ("ids", np.frombuffer(b'["a"]', dtype=np.uint8)),
        ("ids", np.frombuffer(b"[1" + b", 1" * 39 + b"]", dtype=np.uint8)),
        ("labels", np.full(40, np.inf)),
    ],
)
def test_error_names_inconsistent_tensor(name, invalid):
    with pytest.raises(ValueError, match=r"^(x|scale|ids|labels): expected"):
        TrainingRows.from_tensors({**make_rows().tensors(), name: invalid}, 5)


def test_missing_tensors_are_refused():
    with pytest.raises(ValueError, match="x: expected"):
        TrainingRows.from_tensors({}, 5)
