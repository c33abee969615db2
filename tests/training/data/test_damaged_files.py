import io

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

from model_store.errors import InvalidInput
from tests.support.files import npy_header, npz_bytes, parquet_bytes, zip_bytes
from training.data import load
from training.data.findings import inspect_source
from training.data.plan import make_plan
from training.data.rows import split, split_sizes
from training.sections import DataSection

ROWS = 60
RNG = np.random.default_rng(0)
X = [round(float(x), 3) for x in RNG.normal(size=ROWS)]
Y = [["no", "yes"][i % 2] for i in range(ROWS)]
DECIMALS = pa.array(range(ROWS)).cast(pa.decimal128(25, 2))


def table(delimiter=",", end="\n", **columns):
    columns = {
        name: cells for name, cells in ({"x": X, "y": Y} | columns).items() if cells is not None
    }
    rows = [columns, *zip(*columns.values(), strict=True)]
    return end.join(delimiter.join("" if c is None else str(c) for c in row) for row in rows) + end


def number_lines(text):
    return "\n".join(f"{i - 1 if i else ''},{line}" for i, line in enumerate(text.split()))


def replace(cells, **replacements):
    return [replacements.get(f"r{i}", cell) for i, cell in enumerate(cells)]


def picture(shape=(8, 8, 3), kind="PNG", seed=0):
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 255, shape, np.uint8)).save(file, kind)
    return file.getvalue()


def album(folder="", suffix="png", kind="PNG", extra=None):
    files = {f"{folder}{'ab'[i % 2]}/{i}.{suffix}": picture(kind=kind, seed=i) for i in range(30)}
    return zip_bytes({**files, **(extra or {})})


# Per file: content, options, numbers per row, classes (0 for regression) and rows.
VALID_FILES = {
    "plain.csv": (table(), {}, 1, 2, 60),
    "crlf.csv": (table(end="\r\n"), {}, 1, 2, 60),
    "no newline at the end.csv": (table()[:-1], {}, 1, 2, 60),
    "blank lines.csv": (table().replace("\n", "\n\n", 5), {}, 1, 2, 60),
    "commas.csv": (table(";", x=[str(x).replace(".", ",") for x in X]), {}, 1, 2, 60),
    "spaces.csv": (table(", ").replace("x, y", "x,y"), {}, 1, 2, 60),
    "spaces in names.csv": (table().replace("x,y", " x , y "), {}, 1, 2, 60),
    "index.csv": (table(**{"": list(range(ROWS))}).replace("x,y,", "x,y,Unnamed: 0"), {}, 1, 2, 60),
    "index first.csv": (number_lines(table()), {}, 1, 2, 60),
    "gaps.csv": (
        table(x=replace(X, r3=None, r9="NA", r20="nan", r21="null", r30=None, r31=None, r32="N/A")),
        {},
        2,
        2,
        60,
    ),
    "constant.csv": (table(z=[1] * ROWS, w=[None] * ROWS), {}, 1, 2, 60),
    "ids.csv": (
        table(key=[f"k-{i}" for i in range(ROWS)], id=[900 + 7 * i for i in range(ROWS)]),
        {},
        1,
        2,
        60,
    ),
    "no target in some.csv": (table(y=replace(Y, r4=None, r5="", r6="NA")), {}, 1, 2, 57),
    "dates.csv": (table(day=[f"2024-01-{1 + i % 28:02d}" for i in range(ROWS)]), {}, 4, 2, 60),
    "quotes.csv": (table(note=['"a, ""b"""', '"c\nd"'] * 30), {}, 4, 2, 60),
    "unknown values.csv": (
        table(x=[x if i % 4 else "?" for i, x in enumerate(X)]),
        {"missing_values": ["?"]},
        2,
        2,
        60,
    ),
    "booleans.csv": (table(b=["True", "FALSE"] * 30, y=X[::-1]), {}, 4, 0, 60),
    "tiny numbers.csv": (table(y=[f"{x * 1e-12}" for x in X]), {}, 1, 0, 60),
    "large numbers.csv": (table(y=[f"{x * 1e12}" for x in X]), {}, 1, 0, 60),
    "counts.csv": (table(y=RNG.poisson(20, ROWS).tolist()), {}, 1, 0, 60),
    "signs.csv": (table(x=[f"+{abs(x)}" for x in X]), {}, 1, 2, 60),
    "exponents.csv": (table(x=[f"{x:.3E}" for x in X]), {}, 1, 2, 60),
    "dictionary.parquet": (
        parquet_bytes({"c": pa.array(["u", "v"] * 30).dictionary_encode(), "y": Y}),
        {},
        3,
        2,
        60,
    ),
    "decimals.parquet": (parquet_bytes({"x": DECIMALS, "z": X, "y": Y}), {}, 1, 2, 60),
    "pixels.npz": (npz_bytes(x=RNG.integers(0, 255, (60, 4, 4), np.uint8), y=Y), {}, 16, 2, 60),
    "album.zip": (album(), {}, 192, 2, 30),
    "outer folder.zip": (
        album("photos/", extra={"photos/.DS_Store": b"", "__MACOSX/a/1.png": b""}),
        {},
        192,
        2,
        30,
    ),
    "webp.zip": (album("train/", "webp", "WEBP"), {}, 192, 2, 30),
    "tiff.zip": (album("train/", "tif", "TIFF"), {}, 192, 2, 30),
    "sizes.zip": (album(extra={"a/big.png": picture((40, 20, 3))}), {}, 192, 2, 31),
}
# Per file: content, options and error message.
INVALID_FILES = {
    "empty.csv": ("", {}, "a first line of empty.csv that names the columns, got an empty file"),
    "header.csv": ("x,y\n", {}, "data.source: expected at least 20 rows, got 0"),
    "few.csv": ("x,y\n1,a\n2,b\n", {}, "data.source: expected at least 20 rows, got 2"),
    "no header.csv": ("1,2\n" * 60, {}, "a first line of no header.csv that names the columns"),
    "cut.csv": (table().rpartition(",")[0], {}, "2 cells, as the first line, got 1"),
    "ragged.csv": (table().replace("\n", ",,x\n", 3).replace(",,x\n", "\n", 1), {}, "2 cells, as the first line, got 4"),
    "open quote.csv": (table().replace("yes", '"yes', 1), {}, "closed quotes, got an open quote at the end"),
    "stray quotes.csv": (table().replace("yes", '"yes', 2), {}, "an unmatched quote in the row that starts in line 3"),
    "comment.csv": ("# of May\n" + table(), {}, "1 cell, as the first line, '# of May', got 2; '# of May' may be a comment"),
    "no name.csv": (table(z=X).replace("x,y,z", "x,,y"), {}, "columns with unique names"),
    "names twice.csv": (table().replace("x,y", "y,y"), {}, "columns with unique names, got 'y' more than once"),
    "one class.csv": (table(y=["no"] * ROWS), {}, "labels of 2 to 1000 classes, got 1"),
    "no target.csv": (table(y=[None] * ROWS), {}, "data.source: expected at least 20 rows, got 0"),
    "same target.csv": (table(y=[2.5] * ROWS), {"task": "regression"}, "different training targets"),
    "bad cells.csv": (table(x=replace(X, r3="?", r9="n/k")), {}, r"column x: expected numbers, .*'\?' in row 3"),
    "infinite.csv": (table(x=replace(X, r3="inf")), {}, "column x: expected finite numbers, got infinity in row 3"),
    "huge.csv": (table(y=[f"{x}e300" for x in X]), {}, "data.target: expected numbers in float32's range"),
    "either way.csv": (table(day=[f"0{1 + i % 9}/0{1 + i % 5}/2024" for i in range(ROWS)]), {}, "column day: exp"),
    "parquet.csv": (parquet_bytes({"x": X, "y": Y}), {}, "data.source: expected"),
    "text.parquet": (table(), {}, "data.source: expected a whole parquet file"),
    "lists.parquet": (parquet_bytes({"x": [[1, 2]] * ROWS, "y": Y}), {}, "a column in addition to the target, got none"),
    "cut.parquet": (parquet_bytes({"x": X, "y": Y})[:-50], {}, "data.source: expected a whole parquet file"),
    "cut.npz": (npz_bytes(x=np.zeros((60, 4)), y=Y)[:-30], {}, "cut.npz: expected an npz file"),
    "objects.npz": (npz_bytes(x=npy_header((60,), "|O"), y=Y), {}, "objects.npz: expected an npz file of arrays"),
    "lengths.npz": (npz_bytes(x=np.zeros((60, 4)), y=Y[:50]), {}, r"arrays x \(N, \.\.\.\) and y \(N,\)"),
    "other names.npz": (npz_bytes(data=np.zeros((60, 4)), label=Y), {}, r"arrays x \(N, \.\.\.\) and y \(N,\)"),
    "nan.npz": (npz_bytes(x=np.full((60, 4), np.nan), y=Y), {}, r"x\.0\.0: expected a finite number in float32's range"),
    "no zip.zip": (b"PK\x03\x04 not really", {}, "data.source: expected a folder or zip file"),
    "no images.zip": (zip_bytes({"1.png": picture(), "2.png": picture()}), {}, "images train/CLASS"),
    "empty class.zip": (album(extra={"c/readme.txt": b"x"}), {}, r"folder 'c': expected images"),
    "broken image.zip": (album(extra={"a/x.png": picture()[:-30]}), {}, r"'a/x.png': expected a whole PNG"),
    "no image.zip": (album(extra={"a/x.jpg": b"<html>"}), {}, "'a/x.jpg': expected a PNG, JPEG"),
}  # fmt: skip


def read_rows(folder, name, content, task=None, target="y", **data):
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    kind = {"zip": "images"}.get(name.rpartition(".")[2], name.rpartition(".")[2])
    names = {"target": target} if kind in ("csv", "parquet") else {}
    section = DataSection(source=f"{kind}:{name}", **names, **data)
    recipe = make_plan(inspect_source(section, folder, task), section, None, None).recipe
    dataset = load(recipe, folder)
    return dataset, split(dataset, split_sizes(recipe))


@pytest.mark.parametrize("name", VALID_FILES)
def test_unusual_files_are_read_correctly(tmp_path, name):
    content, options, width, classes, rows = VALID_FILES[name]
    data, splits = read_rows(tmp_path, name, content, **options)
    assert (len(splits.train.x[0]), len(data.classes), len(data.train) + len(data.test)) == (
        width,
        classes,
        rows,
    )
    assert np.isfinite(splits.train.x).all()


@pytest.mark.parametrize("name", INVALID_FILES)
def test_damaged_files_raise_a_one_line_error(tmp_path, name):
    content, options, message = INVALID_FILES[name]
    with pytest.raises(InvalidInput, match=message) as error:
        read_rows(tmp_path, name, content, **options)
    assert "\n" not in str(error.value)
    assert "expected" in str(error.value)
