import gzip
import re
import struct
from dataclasses import replace

import numpy as np
import pytest
from sklearn.datasets import load_digits

from tests.support.recipes import get_recipe
from tests.support.refusals import assert_invalid
from training.data import load
from training.data.arrays import digits, read_idx
from training.data.rows import Dataset, Rows, SplitSizes, leave_out, split


def idx_bytes(array, shape=None, magic=None):
    shape = array.shape if shape is None else shape
    magic = bytes([0, 0, 8, len(shape)]) if magic is None else magic
    return magic + struct.pack(f">{len(shape)}I", *shape) + array.astype(np.uint8).tobytes()


def write_idx(folder, is_gzip=False, **changes):
    rng = np.random.default_rng(0)
    arrays = {
        "train-images-idx3-ubyte": rng.integers(0, 256, (12, 4, 5)),
        "train-labels-idx1-ubyte": np.arange(12) % 3,
        "t10k-images-idx3-ubyte": rng.integers(0, 256, (6, 4, 5)),
        "t10k-labels-idx1-ubyte": np.array([2, 1, 0, 0, 1, 1]),
    } | {
        name.replace("_", "-") + ("-idx3-ubyte" if "images" in name else "-idx1-ubyte"): a
        for name, a in changes.items()
    }
    for name, array in arrays.items():
        content = idx_bytes(array)
        (folder / (f"{name}.gz" if is_gzip else name)).write_bytes(
            gzip.compress(content) if is_gzip else content
        )
    return arrays


def test_digits_contain_each_scikit_learn_row_once():
    data, bunch = digits(), load_digits()
    assert (len(data.train), len(data.test)) == (1438, 359)
    assert data.shape == (8, 8)
    assert data.classes == tuple("0123456789")
    all_rows = np.concatenate([np.column_stack([r.x, r.y]) for r in (data.train, data.test)])
    expected = np.column_stack([bunch.data, bunch.target])
    assert np.array_equal(sort_rows(all_rows), sort_rows(expected))
    assert (data.train.x.min(), data.train.x.max()) == (data.minimum, data.maximum) == (0, 16)


def sort_rows(array):
    return array[np.lexsort(array.T)]


def test_digits_are_deterministic_and_equal_to_loaded_rows(tmp_path):
    assert digits().digest() == load(get_recipe("digits"), tmp_path).digest()


@pytest.mark.parametrize("is_gzip", [False, True])
def test_idx_files_are_read_plain_and_gzipped(tmp_path, is_gzip):
    (tmp_path / "there").mkdir()
    arrays = write_idx(tmp_path / "there", is_gzip)
    data = load(get_recipe("idx:there"), tmp_path)
    assert (data.shape, data.classes, data.minimum, data.maximum) == (
        (4, 5),
        ("0", "1", "2"),
        0,
        255,
    )
    for rows, name in ((data.train, "train"), (data.test, "t10k")):
        assert np.array_equal(rows.x, arrays[f"{name}-images-idx3-ubyte"].reshape(-1, 20))
        assert np.array_equal(rows.y, arrays[f"{name}-labels-idx1-ubyte"])
        assert rows.x.dtype == np.float32
    assert (
        load(get_recipe(f"idx:{tmp_path / 'there'}"), tmp_path / "elsewhere").digest()
        == data.digest()
    )


def test_digest_changes_with_any_pixel_or_label(tmp_path):
    arrays = write_idx(tmp_path)
    digest = load(get_recipe("idx:."), tmp_path).digest()
    images = arrays["t10k-images-idx3-ubyte"].copy()
    images[0, 0, 0] ^= 1
    write_idx(tmp_path, t10k_images=images)
    assert load(get_recipe("idx:."), tmp_path).digest() != digest
    write_idx(tmp_path, t10k_labels=np.array([2, 1, 0, 0, 1, 0]))
    assert load(get_recipe("idx:."), tmp_path).digest() != digest


@pytest.mark.parametrize("source", ["", "mnist", "idx:", "idx", "digits:", "npz", "csv:", "json:x"])
def test_unknown_sources_are_rejected(tmp_path, source):
    assert_invalid(
        lambda: load(get_recipe(source), tmp_path),
        "data.source",
        "`digits`, `idx:DIR`, `images:PATH`",
        repr(source),
    )


def test_missing_folders_and_files_are_rejected(tmp_path):
    assert_invalid(lambda: load(get_recipe("idx:absent"), tmp_path), "data.source", "absent")
    write_idx(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    assert_invalid(
        lambda: load(get_recipe("idx:."), tmp_path),
        "t10k-labels-idx1-ubyte or t10k-labels-idx1-ubyte.gz",
    )


VALID_IDX = idx_bytes(np.arange(60).reshape(3, 4, 5))


@pytest.mark.parametrize("is_gzip", [False, True])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "an IDX header"),
        (VALID_IDX[:10], "an IDX header"),
        (
            b"\x00\x00\x08\x01" + VALID_IDX[4:],
            "an IDX header of unsigned bytes and 3 axes, got bytes 00000801",
        ),
        (
            b"\x00\x00\x0d\x03" + VALID_IDX[4:],
            "an IDX header of unsigned bytes and 3 axes, got bytes 00000d03",
        ),
        (b"\x89PNG" + VALID_IDX[4:], "got bytes 89504e47"),
        (VALID_IDX[:-1], "60 bytes of data (shape (3, 4, 5) in its header), got 59"),
        (VALID_IDX + b"\x00", "60 bytes of data (shape (3, 4, 5) in its header), got 61"),
        (
            idx_bytes(np.zeros(9), (2**32 - 1,) * 3),
            "shape (4294967295, 4294967295, 4294967295) in its header",
        ),
    ],
    ids=[
        "empty",
        "truncated header",
        "axes",
        "type",
        "png",
        "truncated",
        "longer",
        "too large",
    ],
)
def test_invalid_headers_and_data_sizes_are_rejected(tmp_path, is_gzip, content, message):
    path = tmp_path / ("x-idx3-ubyte.gz" if is_gzip else "x-idx3-ubyte")
    path.write_bytes(gzip.compress(content) if is_gzip else content)
    assert_invalid(lambda: read_idx(path, 3), path.name, message)


@pytest.mark.parametrize("damage", ["cut", "header", "checksum", "body"])
def test_corrupt_gzip_files_are_rejected(tmp_path, damage):
    rng = np.random.default_rng(0)
    content = bytearray(gzip.compress(idx_bytes(rng.integers(0, 256, (30, 4, 5)))))
    if damage == "cut":
        content = content[: len(content) // 2]
    elif damage == "header":
        content[:2] = b"PK"
    elif damage == "checksum":
        content[-8] ^= 1
    else:
        content[10] |= 0b110  # reserved type of the first block
    path = tmp_path / "x-idx3-ubyte.gz"
    path.write_bytes(content)
    assert_invalid(lambda: read_idx(path, 3), path.name, "a readable IDX file, plain or gzipped")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_labels": np.arange(11) % 3}, "y_train: expected shape (12,), one for each row"),
        ({"t10k_labels": np.arange(7) % 3}, "y_test: expected shape (6,), one for each row"),
        ({"t10k_images": np.zeros((6, 5, 4))}, "x_test: expected rows of shape (4, 5) as in x_tr"),
        ({"train_labels": np.zeros(12), "t10k_labels": np.zeros(6)}, "2 to 1000 classes, got 1"),
    ],
)
def test_inconsistent_idx_files_are_rejected(tmp_path, changes, message):
    write_idx(tmp_path, **changes)
    assert_invalid(lambda: load(get_recipe("idx:."), tmp_path), message)


def make_dataset(rows, classes=2):
    x = np.arange(rows, dtype=np.float32)[:, None]
    y = (np.arange(rows) % classes).astype(np.int64)
    return Dataset(
        Rows(x, y), Rows(-1 - x[:5], y[:5]), (1,), tuple(map(str, range(classes))), 0.0, 1.0
    )


def test_splits_partition_the_training_rows():
    data = make_dataset(100)
    splits = split(data, SplitSizes(10, 15, 20, seed=0))
    parts = [splits.validation, splits.reference, splits.ranking, splits.train]
    assert [len(part) for part in parts] == [10, 15, 20, 55]
    assert sorted(np.concatenate([part.x[:, 0] for part in parts])) == list(range(100))
    for part in parts:
        assert np.array_equal(part.x[:, 0] % 2, part.y)
    assert splits.test is data.test


def test_splits_are_determined_by_the_seed():
    data = make_dataset(100)
    first = split(data, SplitSizes(10, 15, 20, seed=0))
    assert np.array_equal(split(data, SplitSizes(10, 15, 20, seed=0)).train.x, first.train.x)
    assert not np.array_equal(split(data, SplitSizes(10, 15, 20, seed=1)).train.x, first.train.x)


def test_holding_out_more_than_half_of_the_rows_is_rejected():
    assert len(split(make_dataset(101), SplitSizes(10, 20, 20, seed=0)).train) == 51
    field = "data.validation + reference + ranking"
    assert_invalid(
        lambda: split(make_dataset(101), SplitSizes(10, 20, 21, seed=0)),
        field,
        "up to half of the 101 training rows, got 51",
    )


def test_training_rows_without_positive_weights_are_rejected():
    data, weights = make_dataset(100), np.zeros(100)
    first = split(data, SplitSizes(10, 15, 20, seed=0))
    weights[first.validation.x[:, 0].astype(int)] = 1.0
    weighted = replace(data, train=replace(data.train, weights=weights))
    assert_invalid(
        lambda: split(weighted, SplitSizes(10, 15, 20, seed=0)),
        "data.weight",
        "a training row with a positive weight, got only zeros in 55 rows",
    )


def test_class_without_training_rows_is_rejected():
    data = make_dataset(100)
    incomplete = Dataset(data.train, data.test, data.shape, ("0", "1", "2"), 0.0, 1.0)
    assert_invalid(
        lambda: split(incomplete, SplitSizes(10, 10, 10, seed=0)),
        "data.source",
        "training rows of every class",
        "got none of ['2']",
    )


def test_left_out_classes_are_removed_and_their_test_rows_kept_separately():
    full = digits()
    reduced = leave_out(full, ["3", "8"])
    assert reduced.classes == ("0", "1", "2", "4", "5", "6", "7", "9")
    for part in ("train", "test"):
        before, after = getattr(full, part), getattr(reduced, part)
        is_kept = ~np.isin(before.y, [3, 8])
        assert np.array_equal(after.x, before.x[is_kept])
        assert [reduced.classes[c] for c in after.y.tolist()] == [
            full.classes[c] for c in before.y[is_kept].tolist()
        ]
    assert np.array_equal(reduced.left_out, full.test.x[np.isin(full.test.y, [3, 8])])
    assert reduced.digest() != full.digest()
    assert leave_out(full, []) is full


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["3", "x"], "some of ['0', '1', '2', '3', '4', '5', '6', '7', '8', '9'], got ['x']"),
        (list("012345678"), "at least two remaining classes, got ['9']"),
    ],
)
def test_invalid_classes_to_leave_out_are_rejected(names, message):
    assert_invalid(lambda: leave_out(digits(), names), "data.leave_out", message)


def test_take_returns_rows_in_the_requested_order():
    rows = make_dataset(10).train.take(np.array([3, 1, 1]))
    assert rows.x[:, 0].tolist() == [3, 1, 1]
    assert rows.y.tolist() == [1, 1, 1]
    assert re.fullmatch("[0-9a-f]{64}", make_dataset(10).digest())
