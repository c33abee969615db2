import gzip
import re
import struct
from dataclasses import replace

import numpy as np
import pytest
from sklearn.datasets import load_digits

from tests.support.recipes import get_recipe
from tests.support.refusals import refused
from training.data import load
from training.data.arrays import digits, read_idx
from training.data.rows import Dataset, Rows, SplitSizes, leave_out, split


def idx_bytes(array, shape=None, magic=None):
    shape = array.shape if shape is None else shape
    magic = bytes([0, 0, 8, len(shape)]) if magic is None else magic
    return magic + struct.pack(f">{len(shape)}I", *shape) + array.astype(np.uint8).tobytes()


def write_idx(folder, zipped=False, **changed):
    rng = np.random.default_rng(0)
    arrays = {
        "train-images-idx3-ubyte": rng.integers(0, 256, (12, 4, 5)),
        "train-labels-idx1-ubyte": np.arange(12) % 3,
        "t10k-images-idx3-ubyte": rng.integers(0, 256, (6, 4, 5)),
        "t10k-labels-idx1-ubyte": np.array([2, 1, 0, 0, 1, 1]),
    } | {
        name.replace("_", "-") + ("-idx3-ubyte" if "images" in name else "-idx1-ubyte"): a
        for name, a in changed.items()
    }
    for name, array in arrays.items():
        content = idx_bytes(array)
        (folder / (f"{name}.gz" if zipped else name)).write_bytes(
            gzip.compress(content) if zipped else content
        )
    return arrays


def test_digits_are_all_of_scikit_learns_rows_once():
    data, bunch = digits(), load_digits()
    assert (len(data.train), len(data.test)) == (1438, 359)
    assert data.shape == (8, 8)
    assert data.classes == tuple("0123456789")
    together = np.concatenate([np.column_stack([r.x, r.y]) for r in (data.train, data.test)])
    expected = np.column_stack([bunch.data, bunch.target])
    assert np.array_equal(rows_sorted(together), rows_sorted(expected))
    assert (data.train.x.min(), data.train.x.max()) == (data.minimum, data.maximum) == (0, 16)


def rows_sorted(array):
    return array[np.lexsort(array.T)]


def test_digits_are_the_same_every_time_and_load_gives_them(tmp_path):
    assert digits().digest() == load(get_recipe("digits"), tmp_path).digest()


@pytest.mark.parametrize("zipped", [False, True])
def test_idx_files_are_read_plain_and_gzipped(tmp_path, zipped):
    (tmp_path / "there").mkdir()
    arrays = write_idx(tmp_path / "there", zipped)
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


def test_the_digest_changes_with_any_pixel_or_label(tmp_path):
    arrays = write_idx(tmp_path)
    before = load(get_recipe("idx:."), tmp_path).digest()
    images = arrays["t10k-images-idx3-ubyte"].copy()
    images[0, 0, 0] ^= 1
    write_idx(tmp_path, t10k_images=images)
    assert load(get_recipe("idx:."), tmp_path).digest() != before
    write_idx(tmp_path, t10k_labels=np.array([2, 1, 0, 0, 1, 0]))
    assert load(get_recipe("idx:."), tmp_path).digest() != before


@pytest.mark.parametrize("source", ["", "mnist", "idx:", "idx", "digits:", "npz", "csv:", "json:x"])
def test_an_unknown_source_is_refused(tmp_path, source):
    refused(
        lambda: load(get_recipe(source), tmp_path),
        "data.source",
        "`digits`, `idx:DIR`, `images:PATH`",
        repr(source),
    )


def test_a_missing_folder_or_file_is_refused(tmp_path):
    refused(lambda: load(get_recipe("idx:absent"), tmp_path), "data.source", "absent")
    write_idx(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    refused(
        lambda: load(get_recipe("idx:."), tmp_path),
        "t10k-labels-idx1-ubyte or t10k-labels-idx1-ubyte.gz",
    )


GOOD = idx_bytes(np.arange(60).reshape(3, 4, 5))


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "an IDX header"),
        (GOOD[:10], "an IDX header"),
        (
            b"\x00\x00\x08\x01" + GOOD[4:],
            "an IDX header of unsigned bytes and 3 axes, got bytes 00000801",
        ),
        (
            b"\x00\x00\x0d\x03" + GOOD[4:],
            "an IDX header of unsigned bytes and 3 axes, got bytes 00000d03",
        ),
        (b"\x89PNG" + GOOD[4:], "got bytes 89504e47"),
        (GOOD[:-1], "60 bytes of data (shape (3, 4, 5) in its header), got 59"),
        (GOOD + b"\x00", "60 bytes of data (shape (3, 4, 5) in its header), got 61"),
        (
            idx_bytes(np.zeros(9), (2**32 - 1,) * 3),
            "shape (4294967295, 4294967295, 4294967295) in its header",
        ),
    ],
    ids=[
        "empty",
        "cut header",
        "axes",
        "type",
        "png",
        "cut",
        "longer",
        "too large",
    ],
)
def test_a_file_that_is_not_what_its_header_says_is_refused(tmp_path, zipped, content, says):
    path = tmp_path / ("x-idx3-ubyte.gz" if zipped else "x-idx3-ubyte")
    path.write_bytes(gzip.compress(content) if zipped else content)
    refused(lambda: read_idx(path, 3), path.name, says)


@pytest.mark.parametrize("damage", ["cut", "header", "checksum", "body"])
def test_a_corrupt_gzip_file_is_refused(tmp_path, damage):
    rng = np.random.default_rng(0)
    content = bytearray(gzip.compress(idx_bytes(rng.integers(0, 256, (30, 4, 5)))))
    if damage == "cut":
        content = content[: len(content) // 2]
    elif damage == "header":
        content[:2] = b"PK"
    elif damage == "checksum":
        content[-8] ^= 1
    else:
        content[10] |= 0b110  # the type of the first block: reserved
    path = tmp_path / "x-idx3-ubyte.gz"
    path.write_bytes(content)
    refused(lambda: read_idx(path, 3), path.name, "a readable IDX file, plain or gzipped")


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"train_labels": np.arange(11) % 3}, "y_train: expected shape (12,), one for each row"),
        ({"t10k_labels": np.arange(7) % 3}, "y_test: expected shape (6,), one for each row"),
        ({"t10k_images": np.zeros((6, 5, 4))}, "x_test: expected rows of shape (4, 5) as in x_tr"),
        ({"train_labels": np.zeros(12), "t10k_labels": np.zeros(6)}, "2 to 1000 classes, got 1"),
    ],
)
def test_files_that_do_not_go_together_are_refused(tmp_path, changed, says):
    write_idx(tmp_path, **changed)
    refused(lambda: load(get_recipe("idx:."), tmp_path), says)


def numbered(rows, classes=2):
    x = np.arange(rows, dtype=np.float32)[:, None]
    y = (np.arange(rows) % classes).astype(np.int64)
    return Dataset(
        Rows(x, y), Rows(-1 - x[:5], y[:5]), (1,), tuple(map(str, range(classes))), 0.0, 1.0
    )


def test_splits_are_disjoint_and_together_the_training_rows():
    data = numbered(100)
    splits = split(data, SplitSizes(10, 15, 20, seed=0))
    parts = [splits.validation, splits.reference, splits.ranking, splits.train]
    assert [len(part) for part in parts] == [10, 15, 20, 55]
    assert sorted(np.concatenate([part.x[:, 0] for part in parts])) == list(range(100))
    for part in parts:
        assert np.array_equal(part.x[:, 0] % 2, part.y)
    assert splits.test is data.test


def test_splits_are_a_function_of_the_seed():
    data = numbered(100)
    first = split(data, SplitSizes(10, 15, 20, seed=0))
    assert np.array_equal(split(data, SplitSizes(10, 15, 20, seed=0)).train.x, first.train.x)
    assert not np.array_equal(split(data, SplitSizes(10, 15, 20, seed=1)).train.x, first.train.x)


def test_holding_out_more_than_half_of_the_rows_is_refused():
    assert len(split(numbered(101), SplitSizes(10, 20, 20, seed=0)).train) == 51
    field = "data.validation + reference + ranking"
    refused(
        lambda: split(numbered(101), SplitSizes(10, 20, 21, seed=0)),
        field,
        "up to half of the 101 training rows, got 51",
    )


def test_training_rows_without_weight_are_refused():
    data, weights = numbered(100), np.zeros(100)
    first = split(data, SplitSizes(10, 15, 20, seed=0))
    weights[first.validation.x[:, 0].astype(int)] = 1.0
    weighted = replace(data, train=replace(data.train, weights=weights))
    refused(
        lambda: split(weighted, SplitSizes(10, 15, 20, seed=0)),
        "data.weight",
        "a training row with a positive weight, got only zeros in 55 rows",
    )


def test_a_class_without_training_rows_is_refused():
    data = numbered(100)
    absent = Dataset(data.train, data.test, data.shape, ("0", "1", "2"), 0.0, 1.0)
    refused(
        lambda: split(absent, SplitSizes(10, 10, 10, seed=0)),
        "data.source",
        "training rows of every class",
        "got none of ['2']",
    )


def test_a_class_that_is_left_out_is_in_no_row_and_its_test_rows_are_kept_aside():
    full = digits()
    rest = leave_out(full, ["3", "8"])
    assert rest.classes == ("0", "1", "2", "4", "5", "6", "7", "9")
    for part in ("train", "test"):
        before, after = getattr(full, part), getattr(rest, part)
        retained = ~np.isin(before.y, [3, 8])
        assert np.array_equal(after.x, before.x[retained])
        assert [rest.classes[c] for c in after.y.tolist()] == [
            full.classes[c] for c in before.y[retained].tolist()
        ]
    assert np.array_equal(rest.left_out, full.test.x[np.isin(full.test.y, [3, 8])])
    assert rest.digest() != full.digest()
    assert leave_out(full, []) is full


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["3", "x"], "some of ['0', '1', '2', '3', '4', '5', '6', '7', '8', '9'], got ['x']"),
        (list("012345678"), "at least two remaining classes, got ['9']"),
    ],
)
def test_classes_that_cannot_be_left_out_are_refused(names, says):
    refused(lambda: leave_out(digits(), names), "data.leave_out", says)


def test_rows_are_taken_in_the_order_asked_for():
    rows = numbered(10).train.take(np.array([3, 1, 1]))
    assert rows.x[:, 0].tolist() == [3, 1, 1]
    assert rows.y.tolist() == [1, 1, 1]
    assert re.fullmatch("[0-9a-f]{64}", numbered(10).digest())
