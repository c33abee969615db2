import io
import zipfile

import numpy as np
import pytest

from tests.support.recipes import get_recipe
from tests.support.refusals import assert_invalid
from training.data import load

RNG = np.random.default_rng(0)
X = RNG.normal(size=(20, 3, 4))
Y = np.arange(20) % 2


def make_loader(tmp_path, task="classification", **arrays):
    np.savez(tmp_path / "a.npz", **arrays)
    return lambda **data: load(get_recipe("npz:a.npz", task, **data), tmp_path)


def test_unsplit_arrays_are_split_by_test_fraction(tmp_path):
    data = make_loader(tmp_path, x=X, y=Y)(test_fraction=0.25)
    assert (data.shape, len(data.train), len(data.test)) == ((3, 4), 15, 5)
    all_rows = np.concatenate([data.train.x, data.test.x])
    assert sorted(all_rows.tolist()) == sorted(X.reshape(20, 12).astype(np.float32).tolist())
    assert np.array_equal(data.train.x, X[data.train.ids].reshape(15, 12).astype(np.float32))
    assert (data.minimum, data.maximum) == (data.train.x.min(), data.train.x.max())


def test_image_detectors_are_rejected_for_other_rows(tmp_path):
    np.savez(tmp_path / "a.npz", x=X.reshape(20, 12), y=Y)
    recipe = get_recipe("npz:a.npz")
    serving = recipe.serving.model_copy(update={"combined": ["entropy", "roughness"]})
    invalid_recipe = recipe.model_copy(update={"serving": serving})
    assert_invalid(
        lambda: load(invalid_recipe, tmp_path),
        "serving.combined",
        "detectors without roughness, which needs images",
    )


def test_existing_splits_of_arrays_are_kept(tmp_path):
    data = make_loader(tmp_path, x_train=X, y_train=Y, x_test=X[:4], y_test=Y[:4])()
    assert np.array_equal(data.train.x, X.reshape(20, 12).astype(np.float32))
    assert np.array_equal(data.test.y, Y[:4])


@pytest.mark.parametrize(
    ("labels", "classes"),
    [
        (np.arange(20) % 12, tuple(str(i) for i in range(12))),
        (np.where(Y, 10, 9), ("9", "10")),
        (np.where(Y, -1, 1).astype(np.int8), ("-1", "1")),
        (np.where(Y, "cat", "ape"), ("ape", "cat")),
    ],
    ids=["numbers", "by value", "negative", "strings"],
)
def test_labels_can_be_integers_or_strings(tmp_path, labels, classes):
    data = make_loader(tmp_path, x_train=X, y_train=labels, x_test=X, y_test=labels)()
    assert data.classes == classes
    assert [data.classes[c] for c in data.train.y] == [str(label) for label in labels]


def test_uint8_rows_stay_uint8(tmp_path):
    assert (
        make_loader(
            tmp_path, x=RNG.integers(0, 256, (20, 2, 2)).astype(np.uint8), y=Y
        )().train.x.dtype
        == np.uint8
    )


def test_regression_targets_are_float32(tmp_path):
    data = make_loader(tmp_path, "regression", x_train=X, y_train=Y * 1.5, x_test=X, y_test=Y)()
    assert (data.classes, data.train.y.dtype, data.test.y.dtype) == ((), np.float32, np.float32)
    assert np.array_equal(data.train.y, Y * 1.5)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": X}, "arrays x and y, or x_train, y_train, x_test, y_test, got ['x']"),
        ({"x": X, "y": Y, "z": Y}, "arrays x and y"),
        ({"x": X, "y": Y[:-1]}, "y: expected shape (20,), one for each row of x, got (19,)"),
        ({"x": X, "y": Y[:, None]}, "y: expected shape (20,)"),
        ({"x": X[:, 0, 0], "y": Y}, "x: expected rows of at least one number"),
        ({"x": X[:, :0], "y": Y}, "x: expected rows of at least one number"),
        ({"x": np.where(X > 1, np.nan, X), "y": Y}, "a finite number in float32's range"),
        ({"x": X * 1e39, "y": Y}, "a finite number in float32's range"),
        ({"x": X.astype(complex), "y": Y}, "x: expected numbers, got dtype <c16"),
        ({"x": X.astype("S3"), "y": Y}, "x: expected numbers, got dtype |S3"),
        ({"x": X, "y": Y + 0.5}, "strings, booleans or whole numbers, got fractions of dtype <f8"),
        ({"x": X, "y": Y * 0}, "labels of 2 to 1000 classes, got 1"),
        ({"x": X, "y": np.where(Y, "a", "\ud800")}, "labels that can be encoded as UTF-8"),
        ({"x_train": X, "y_train": Y, "x_test": X[:, :2], "y_test": Y}, "x_test: expected rows"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_invalid_arrays_are_rejected(tmp_path, arrays, message):
    assert_invalid(make_loader(tmp_path, **arrays), message)


def test_label_that_occurs_only_in_test_rows_is_a_class(tmp_path):
    data = make_loader(tmp_path, x_train=X, y_train=Y, x_test=X[:1], y_test=Y[:1] + 5)()
    assert data.classes == (*map(str, sorted({*Y.tolist(), int(Y[0]) + 5})),)
    assert data.test.y.tolist() == [data.classes.index(str(Y[0] + 5))]


def test_object_arrays_are_rejected_and_never_unpickled(tmp_path):
    header = b"{'descr': '|O', 'fortran_order': False, 'shape': (2,)}\n"
    member = io.BytesIO(
        b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + b"cos\nsystem\n"
    )
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as file:
        file.writestr("x.npy", member.getvalue())
    assert_invalid(
        lambda: load(get_recipe("npz:a.npz"), tmp_path),
        "a.npz",
        "an npz file of arrays",
        "allow_pickle=False",
    )
    assert_invalid(
        lambda: load(get_recipe("npz:absent.npz"), tmp_path),
        "data.source",
        "'absent.npz', which is neither in",
    )


@pytest.mark.parametrize("dtype", [bool, float, np.uint8])
def test_labels_can_be_booleans_or_integers_of_any_dtype(tmp_path, dtype):
    np.savez(tmp_path / "a.npz", x=X, y=(Y > 0).astype(dtype))
    classes = load(get_recipe("npz:a.npz"), tmp_path).classes
    assert classes == (("false", "true") if dtype is bool else ("0", "1"))
