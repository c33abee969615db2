import csv
import io
import zipfile
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from model_store.artifacts.manifest import (
    CategoricalColumn,
    ImageSpec,
    InputSpec,
    NumericColumn,
    TextSpec,
)
from model_store.errors import InvalidInput
from model_store.sources import row_file
from model_store.sources.columns import encode_cells, encode_objects
from model_store.sources.files import check_ids, open_rows
from service.api.predict import resolve_path
from tests.support.files import npy_bytes, npy_header, zip_bytes
from tests.support.images import png_bytes
from tests.support.recipes import get_recipe
from training.data import load

TABLE_WITH_IDS = InputSpec(
    shape=(7,),
    minimum=-9.0,
    maximum=9.0,
    columns=(
        NumericColumn(name="width", mean=0.0, std=1.0, indicator=True),
        CategoricalColumn(name="is sold", categories=("false", "true")),
        CategoricalColumn(name="city", categories=("Oslo",)),
    ),
    missing_values=("?",),
    id_column="key",
)
ARRAYS = InputSpec(shape=(2, 3), minimum=0.0, maximum=9.0)
IMAGES = InputSpec(shape=(2, 3), minimum=0.0, maximum=255.0, image=ImageSpec(mode="L"))
COLUMNS = (
    NumericColumn(name="width", mean=0.0, std=1.0, indicator=True),
    CategoricalColumn(name="colour", categories=("red", "blue")),
)
TABLE = InputSpec(shape=(5,), minimum=-9.0, maximum=9.0, columns=COLUMNS)
X = np.arange(60, dtype=np.float32).reshape(10, 2, 3) % 10
FLAT = X.reshape(10, 6)


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch):
    monkeypatch.setattr(row_file, "PART_ROWS", 4)


def read_rows(pool, first=0):
    """Return all rows from `first` on, flattened."""
    return np.concatenate(
        [np.asarray(part, dtype=np.float32).reshape(len(part), -1) for part in pool.parts(first)]
    )


def check_error(path, spec, match):
    with pytest.raises(InvalidInput, match=match):
        open_rows(path, spec, "pool_file")


def write_rows(tmp_path, kind):
    path = tmp_path / f"rows.{kind.split()[0]}"
    if kind == "npy":
        np.save(path, X)
    elif kind == "npy flat, fortran":
        path = tmp_path / "rows.npy"
        np.save(path, np.asfortranarray(FLAT.astype(np.int64)))
    elif kind == "npz":
        np.savez(path, x=X)
    elif kind == "npz deflated":
        np.savez_compressed(path, pool=FLAT, ids=np.arange(10), other=np.zeros(3))
    elif kind == "parquet lists":
        pq.write_table(
            pa.table({"id": [f"r{i}" for i in range(10)], "v": list(FLAT), "label": [1] * 10}), path
        )
    elif kind == "parquet nested":
        pq.write_table(pa.table({"v": [row.tolist() for row in X]}), path)
    else:
        pq.write_table(pa.table({f"p{i}": FLAT[:, i] for i in range(6)}), path)
    return path


KINDS = [
    "npy",
    "npy flat, fortran",
    "npz",
    "npz deflated",
    "parquet lists",
    "parquet nested",
    "parquet columns",
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("first", [0, 1, 4, 9])
def test_rows_are_read_from_any_first_row(tmp_path, kind, first):
    pool = open_rows(write_rows(tmp_path, kind), ARRAYS, "pool_file")
    assert pool.rows == 10
    assert read_rows(pool, first).tolist() == FLAT[first:].tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_parts_have_a_maximum_length(tmp_path, kind):
    pool = open_rows(write_rows(tmp_path, kind), ARRAYS, "pool_file")
    assert [len(part) for part in pool.parts()] == [4, 4, 2]


def test_ids_ignored_columns_and_read_as_are_reported(tmp_path):
    npz = open_rows(write_rows(tmp_path, "npz deflated"), ARRAYS, "pool_file")
    assert (npz.ids(), npz.ignored, npz.read_as) == (
        [str(i) for i in range(10)],
        ["other"],
        "the array pool",
    )
    lists = open_rows(write_rows(tmp_path, "parquet lists"), ARRAYS, "pool_file")
    assert (lists.ids(), lists.ignored) == ([f"r{i}" for i in range(10)], ["label"])
    assert lists.read_as == "the column v"
    columns = open_rows(write_rows(tmp_path, "parquet columns"), ARRAYS, "pool_file")
    assert columns.ids() is None
    assert columns.read_as == "the 6 columns of numbers, in the file's order"


ROWS = [
    {"width": 1.5, "colour": "red"},
    {"width": None, "colour": "green"},
    {"width": -2.0, "colour": None},
    {"width": 0.25, "colour": "blue"},
    {"width": 3.0, "colour": "blue"},
]


@pytest.mark.parametrize("kind", ["csv", "semicolons", "parquet"])
def test_table_rows_match_request_objects(tmp_path, kind):
    path = tmp_path / f"rows.{'parquet' if kind == 'parquet' else 'csv'}"
    if kind == "parquet":
        pq.write_table(
            pa.table({"colour": [r["colour"] for r in ROWS], "width": [r["width"] for r in ROWS]}),
            path,
        )
    else:
        with path.open("w", newline="") as file:
            writer = csv.writer(file, delimiter=";" if kind == "semicolons" else ",")
            writer.writerow(["id", "colour", "note", "width"])
            for i, row in enumerate(ROWS):
                cells = ["" if cell is None else cell for cell in (row["colour"], row["width"])]
                writer.writerow([f"r{i}", cells[0], "a, b; c", cells[1]])
    pool = open_rows(path, TABLE, "pool_file")
    expected = encode_objects(ROWS, COLUMNS, "pool")
    x = np.concatenate([encode_cells(part, COLUMNS, "pool") for part in pool.parts()])
    assert x.tolist() == expected.tolist()
    if kind != "parquet":
        assert pool.ids() == [f"r{i}" for i in range(5)]
        assert pool.ignored == ["note"]


def test_error_for_non_numeric_cell_names_row_and_column(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("width,colour\n" + "1,red\n" * 5 + "wide,red\n")
    pool = open_rows(path, TABLE, "pool_file")
    parts = list(pool.parts(4))
    with pytest.raises(
        InvalidInput, match=r"pool_file\.5\.width: expected a number, or null, got a string"
    ):
        encode_cells(parts[0], COLUMNS, "pool_file", 4)


def test_decimal_commas_are_read_if_no_number_has_a_decimal_point(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("width;colour\n1,5;red\n-0,25;blue\n3;red\n")
    pool = open_rows(path, TABLE, "pool_file")
    assert pool.read_as == "2 columns by name, with decimal commas"
    assert next(pool.parts())["width"] == [1.5, -0.25, 3.0]
    path.write_text("width;colour\n1,5;red\n0.25;blue\n")
    check_error(
        path,
        TABLE,
        "pool_file: expected numbers with decimal points or with decimal commas, got both",
    )


@pytest.mark.parametrize("missing", ["n.a.", "."])
def test_dot_in_missing_value_is_not_a_decimal_point(tmp_path, missing):
    path = tmp_path / "rows.csv"
    path.write_text(f"width;colour\n1,5;red\n{missing};blue\n")
    pool = open_rows(path, TABLE.model_copy(update={"missing_values": (missing,)}), "pool_file")
    assert next(pool.parts())["width"] == [1.5, None]


def test_csv_file_is_read_as_in_training(tmp_path):
    """Covers pandas booleans, surrounding blanks, missing values and an id column."""
    path = tmp_path / "rows.csv"
    path.write_text(
        "key, width ,is sold, city,note,note\n007, 1.5,True, Oslo,a,b\n008,?,FALSE,NULL,a,b\n "
        "9,n/a,false,Rome,,\n"
    )
    pool = open_rows(path, TABLE_WITH_IDS, "pool_file")
    assert pool.ids() == ["007", "008", "9"]
    assert (pool.read_as, pool.ignored) == ("3 columns by name, named by key", ["note", "note"])
    expected = {
        "width": [1.5, None, None],
        "is sold": ["true", "false", "false"],
        "city": ["Oslo", None, "Rome"],
    }
    assert next(pool.parts()) == expected
    path.write_text('width,is sold,city\n"1,5",true,Oslo\n"1,234",true,Oslo\n')
    pool = open_rows(path, TABLE_WITH_IDS, "pool_file")
    assert pool.read_as == "3 columns by name, with decimal commas"
    assert next(pool.parts())["width"] == [1.5, 1.234]


@pytest.mark.parametrize(
    ("delimiter", "encoding", "prefix", "point", "missing"),
    [
        (",", "utf-8", "", ".", ""),
        (",", "utf-8-sig", " ", ".", "NULL"),
        (";", "cp1252", "", ",", "n/a"),
        ("\t", "utf-16", " ", ".", "?"),
        ("|", "utf-16-le", "", ".", "#N/A"),
        (",", "latin-1", "", ",", "?"),
    ],
)
def test_training_file_has_the_same_rows_as_a_pool(
    tmp_path, delimiter, encoding, prefix, point, missing
):
    rng = np.random.default_rng(0)
    names = ["key", "age", "city", "vip", "income", "joined", "label"]
    city = "Lag\x81" if encoding == "latin-1" else "Köln"
    rows = [
        [
            f"k{i:03d}",
            str(rng.integers(18, 80)),
            [city, "Oslo", missing][i % 3],
            str(i % 4 == 0),
            missing if i % 5 == 0 else f"{rng.normal():.2f}".replace(".", point),
            f"2024-05-{1 + i % 28:02d}",
            ["no", "yes"][i % 2],
        ]
        for i in range(40)
    ]
    content = io.StringIO()
    csv.writer(content, delimiter=delimiter).writerows(
        [[prefix + cell for cell in row] for row in [names, *rows]]
    )
    (tmp_path / "a.csv").write_bytes(content.getvalue().encode(encoding))
    recipe = get_recipe(
        "csv:a.csv", "classification", target="label", id="key", missing_values=["?"]
    )
    data = load(recipe, tmp_path)
    pool = open_rows(tmp_path / "a.csv", data.input, "pool_file")
    x = np.concatenate([encode_cells(part, data.columns, "pool_file") for part in pool.parts()])
    assert [column.name for column in data.columns] == names[1:-1]
    assert sorted(x.tolist()) == sorted(np.concatenate([data.train.x, data.test.x]).tolist())
    assert pool.ids() == [row[0] for row in rows]
    comma_note = ", with decimal commas" if point == "," else ""
    encoding_note = "" if encoding.startswith("utf-8") else f", as {encoding}"
    assert pool.read_as == f"5 columns by name{comma_note}{encoding_note}, named by key"
    assert data.classes == ("no", "yes")


def test_duplicate_columns_and_rows_without_ids_are_named(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("width,colour,width\n1,red,1\n")
    check_error(path, TABLE, r"pool_file\.width: expected one column with that name, got 2")
    path.write_text("id,width,colour\na,1,red\n ,1,red\n")
    with pytest.raises(InvalidInput, match="id: expected an id for each row, got none in row 1"):
        open_rows(path, TABLE, "pool_file").ids()
    path = tmp_path / "rows.parquet"
    cells = [pa.array([1.0, 2.0]), pa.array(["red", "blue"]), pa.array([1.0, 2.0])]
    pq.write_table(pa.Table.from_arrays(cells, names=["width", "colour", "width"]), path)
    check_error(path, TABLE, r"pool_file\.width: expected one column with that name, got 2")


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        (pa.array([2**60, 2**60 + 1]), [str(2**60), str(2**60 + 1)]),
        (pa.array([b"\x00" * 16, b"\xff" * 16], pa.binary(16)), ["00" * 16, "ff" * 16]),
        (pa.array(["a", "b"]).dictionary_encode(), ["a", "b"]),
        (
            pa.array([10**18, 10**18 + 1], pa.timestamp("ns")),
            ["2001-09-09 01:46:40.000000000", "2001-09-09 01:46:40.000000001"],
        ),
        (pa.array([1.0, float("nan")]), "an id for each row, got none in row 1"),
        (
            pa.array([b"a", b"\xff"]),
            "text or numbers as row ids, got another type in row 1",
        ),
        (
            pa.array([["a"], ["b"]]),
            "text or numbers as row ids, got another type in row 0",
        ),
    ],
    ids=["large", "uuid", "dictionary", "time", "nan", "bytes", "lists"],
)
def test_ids_are_read_as_text_or_refused_by_row(tmp_path, ids, expected):
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"id": ids, "width": [1.0, 2.0], "colour": ["red", "red"]}), path)
    pool = open_rows(path, TABLE, "pool_file")
    if isinstance(expected, list):
        assert pool.ids() == expected
        return
    with pytest.raises(InvalidInput, match=f"id: expected {expected}"):
        pool.ids()


def test_parquet_numeric_strings_are_parsed_and_pandas_index_is_ignored(tmp_path):
    path = tmp_path / "rows.parquet"
    pq.write_table(
        pa.table(
            {
                "width": ["1.5", " -2", "?", None],
                "is sold": ["True", None, "0", "false"],
                "city": ["Oslo"] * 4,
            }
        ),
        path,
    )
    part = next(open_rows(path, TABLE_WITH_IDS, "pool_file").parts())
    assert part == {
        "width": [1.5, -2.0, None, None],
        "is sold": ["true", None, "false", "false"],
        "city": ["Oslo"] * 4,
    }
    index = {"__index_level_0__": np.arange(10)}
    pq.write_table(pa.table({**{f"p{i}": FLAT[:, i] for i in range(6)}, **index}), path)
    pool = open_rows(path, ARRAYS, "pool_file")
    assert (pool.ignored, read_rows(pool).tolist()) == (["__index_level_0__"], FLAT.tolist())


def test_ambiguous_thousands_separators_are_refused(tmp_path):
    path = tmp_path / "rows.csv"
    for cell in ('"1,234"', "1_000"):
        path.write_text(f"width,colour\n{cell},red\n")
        pool = open_rows(path, TABLE, "pool_file")
        with pytest.raises(
            InvalidInput, match=r"pool_file\.0\.width: expected a number, or null, got a string"
        ):
            encode_cells(next(pool.parts()), COLUMNS, "pool_file")


def test_file_truncated_while_reading_is_reported(tmp_path):
    path = write_rows(tmp_path, "npy")
    pool = open_rows(path, ARRAYS, "pool_file")
    parts = pool.parts()
    next(parts)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 100)
    with pytest.raises(
        InvalidInput, match="a whole npy file of numbers, got a file that was truncated"
    ):
        list(parts)


def test_zip_members_are_rows_sorted_by_name(tmp_path):
    path, content = tmp_path / "images.zip", png_bytes(X[0].astype(np.uint8))
    names = ("b/2.png", "a.png", "__MACOSX/._a.png", "b/.DS_Store", "b/")
    path.write_bytes(zip_bytes(dict.fromkeys(names, content)))
    pool = open_rows(path, IMAGES, "pool_file")
    assert pool.ids() == ["a.png", "b/2.png"]
    assert [len(part) for part in pool.parts()] == [2]
    check_error(path, ARRAYS, "pool_file: expected a zip for a model of images or text alone")


def test_backslashes_in_zip_names_separate_folders(tmp_path):
    path = tmp_path / "images.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("b\\", "b\\2.png", "b\\Thumbs.db", "__MACOSX\\._2.png", "a.png"):
            info = zipfile.ZipInfo("x")
            info.filename = name
            archive.writestr(info, png_bytes(X[0].astype(np.uint8)))
    pool = open_rows(path, IMAGES, "pool_file")
    assert pool.ids() == ["a.png", "b/2.png"]
    assert [len(part) for part in pool.parts()] == [2]


def test_csv_cell_can_contain_a_long_text(tmp_path):
    spec = InputSpec(
        shape=(4,),
        dtype="int32",
        minimum=0.0,
        maximum=9.0,
        text=TextSpec(column="review", max_tokens=4, pad_id=0, padding="right", truncation="right"),
    )
    path = tmp_path / "rows.csv"
    path.write_text(f"review\n{'a' * 200_000}\n")
    assert [len(text) for part in open_rows(path, spec, "pool_file").parts() for text in part] == [
        200_000
    ]


def test_parquet_column_of_files_is_read_as_images(tmp_path):
    path = tmp_path / "images.parquet"
    content = png_bytes(X[0].astype(np.uint8))
    pq.write_table(
        pa.table({"image": [{"bytes": content, "path": "a"}] * 3, "label": [0, 1, 2]}), path
    )
    pool = open_rows(path, IMAGES, "pool_file")
    assert next(pool.parts()) == [content] * 3
    assert pool.read_as == "files in the column image"


def test_invalid_pool_files_are_refused_with_the_reason(tmp_path):
    for suffix in (".npy", ".npz", ".parquet", ".zip"):
        (tmp_path / f"broken{suffix}").write_bytes(b"rubbish" * 100)
        spec = IMAGES if suffix == ".zip" else ARRAYS
        check_error(
            tmp_path / f"broken{suffix}", spec, f"pool_file: expected a whole {suffix[1:]} file"
        )
    (tmp_path / "rows.xlsx").write_bytes(b"")
    check_error(tmp_path / "rows.xlsx", ARRAYS, r"a file that ends in \.npy, .*got \.xlsx")
    np.save(tmp_path / "wide.npy", np.zeros((3, 7)))
    check_error(tmp_path / "wide.npy", ARRAYS, r"shape \(N, 2, 3\) or \(N, 6\), got shape \(3, 7\)")
    np.save(tmp_path / "none.npy", np.zeros((0, 6)))
    check_error(tmp_path / "none.npy", ARRAYS, "at least one row, got none")
    (tmp_path / "objects.npy").write_bytes(npy_header((3,), "|O"))
    check_error(tmp_path / "objects.npy", ARRAYS, "a whole npy file of numbers")
    members = {"x.npy": npy_bytes(FLAT), "ids.npy": npy_header((10,), "|O")}
    (tmp_path / "objects.npz").write_bytes(zip_bytes(members))
    check_error(
        tmp_path / "objects.npz",
        ARRAYS,
        "ids: expected an array of numbers or strings, got one of Python objects",
    )
    np.savez(tmp_path / "two.npz", a=FLAT, b=FLAT)
    check_error(
        tmp_path / "two.npz", ARRAYS, "one array of rows, or one of several that is named pool or"
    )
    pq.write_table(pa.table({"a": [1.0]}), tmp_path / "narrow.parquet")
    check_error(
        tmp_path / "narrow.parquet",
        ARRAYS,
        "one column of lists of 6 numbers, or 6 columns of numbers",
    )
    check_error(
        tmp_path / "narrow.parquet",
        TABLE,
        r"pool_file\.width: expected a column with that name, got columns a",
    )
    (tmp_path / "ragged.csv").write_text("width,colour\n1,red\n2\n")
    check_error(
        tmp_path / "ragged.csv", TABLE, r"pool_file\.1: expected 2 cells, as the first line, got 1"
    )
    for text in (
        'width,colour\n1,red\n2,"red\n3,red\n',
        'width,colour\n1,red\n2,"',
        'width,"colour\n1,red\n',
    ):
        (tmp_path / "open.csv").write_text(text)
        check_error(
            tmp_path / "open.csv",
            TABLE,
            "with closed quotes, got an open quote at the end",
        )
    (tmp_path / "open.csv").write_text('width,colour\n1,"red\n2,red\n3,"red\n')
    check_error(
        tmp_path / "open.csv", TABLE, "got an unmatched quote in the row that starts in line 2"
    )
    (tmp_path / "open.csv").write_text('sep=,\nwidth,colour\n1,"red\n2,red\n3,"red\n')
    check_error(
        tmp_path / "open.csv", TABLE, "got an unmatched quote in the row that starts in line 3"
    )
    (tmp_path / "open.csv").write_text('width,colour\n1,"' + "2 red\n" * 3_000_000)
    check_error(tmp_path / "open.csv", TABLE, "with closed quotes, got field larger than")


@pytest.mark.parametrize("encoding", ["DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY"])
def test_delta_encoded_parquet_texts_are_read(tmp_path, encoding):
    path, texts = tmp_path / "rows.parquet", [f"text {n % 7}" for n in range(600)]
    table = pa.table({"width": [1.0] * 600, "is sold": texts, "city": texts, "key": texts})
    names = {"is sold": encoding, "city": encoding, "key": encoding}
    pq.write_table(table, path, use_dictionary=False, column_encoding=names)
    pool = open_rows(path, TABLE_WITH_IDS, "pool_file")
    assert [text for part in pool.parts() for text in part["city"]] == texts
    assert [text for part in pool.id_parts() for text in part] == texts


def test_parquet_errors_include_the_reason_from_pyarrow(tmp_path, monkeypatch):
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({f"p{i}": FLAT[:, i] for i in range(6)}), path)
    check_error(
        path.with_suffix(".absent.parquet"), ARRAYS, "a readable parquet file, got No such file"
    )
    content = path.read_bytes()
    path.write_bytes(content[:-8])
    check_error(path, ARRAYS, "a whole parquet file, got Parquet magic bytes not found in footer")

    def fail(error):
        monkeypatch.setattr(pq.ParquetFile, "__init__", Mock(side_effect=error))

    fail(OSError("Not yet implemented: Unsupported encoding."))
    check_error(
        path, ARRAYS, "a supported parquet file, got Not yet implemented: Unsupported encoding"
    )
    fail(pa.ArrowMemoryError("malloc of size 10 failed"))
    with pytest.raises(MemoryError):
        open_rows(path, ARRAYS, "pool_file")


def test_parquet_booleans_are_not_numbers(tmp_path):
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"width": [True, None], "colour": ["red", "blue"]}), path)
    part = next(open_rows(path, TABLE, "pool_file").parts())
    with pytest.raises(InvalidInput, match=r"pool_file\.0\.width: expected a number, .* a boolean"):
        encode_cells(part, COLUMNS, "pool_file")
    pq.write_table(pa.table({f"p{i}": FLAT[:, i] > 1 for i in range(6)}), path)
    check_error(path, ARRAYS, "6 columns of numbers, got 0 of lists and 0 of numbers")
    pq.write_table(pa.table({"v": (FLAT > 1).tolist()}), path)
    check_error(path, ARRAYS, "one column of lists of 6 numbers, .* got 0 of lists")


def test_error_for_list_of_wrong_length_names_its_row(tmp_path):
    path = tmp_path / "ragged.parquet"
    pq.write_table(pa.table({"v": [[1.0] * 6] * 5 + [[1.0] * 5] + [[1.0] * 7]}), path)
    pool = open_rows(path, ARRAYS, "pool_file")
    with pytest.raises(InvalidInput, match=r"pool_file\.5: expected 6 numbers, got 5"):
        list(pool.parts())


def test_damaged_npz_is_reported_while_reading(tmp_path):
    np.savez_compressed(tmp_path / "rows.npz", x=np.random.default_rng(0).normal(size=(1000, 6)))
    content = bytearray((tmp_path / "rows.npz").read_bytes())
    content[2000] ^= 255
    (tmp_path / "rows.npz").write_bytes(content)
    pool = open_rows(tmp_path / "rows.npz", ARRAYS, "pool_file")
    with pytest.raises(InvalidInput, match="a whole npz file"):
        list(pool.parts())


def test_duplicate_or_missing_ids_are_refused():
    check_ids(["a", "b"], 2)
    with pytest.raises(InvalidInput, match="an id for each of the 3 pool rows, got 2"):
        check_ids(["a", "b"], 3)
    with pytest.raises(InvalidInput, match="duplicates such as 'b'"):
        check_ids(["a", "b", "c", "b"], 4)


def test_pool_paths_cannot_leave_the_pools_folder(tmp_path):
    folder, outside = tmp_path / "pools", tmp_path / "secret.npy"
    (folder / "sub").mkdir(parents=True)
    outside.write_text("")
    (folder / "sub" / "rows.npy").write_text("")
    (folder / "link.npy").symlink_to(outside)
    (folder / "inside.npy").symlink_to(folder / "sub" / "rows.npy")
    assert resolve_path(folder, "sub/rows.npy", "pool_file") == folder / "sub" / "rows.npy"
    assert resolve_path(folder, "inside.npy", "pool_file") == folder / "sub" / "rows.npy"
    names = ("../secret.npy", str(outside), str(folder / "inside.npy"), "link.npy")
    for name in (*names, "sub/../../secret.npy"):
        with pytest.raises(InvalidInput, match=r"name of a file .* got a path outside the folder"):
            resolve_path(folder, name, "pool_file")
    for name in (".", "no.npy", "sub", "", "a\0b"):
        with pytest.raises(InvalidInput, match=r"name of a file .* got a missing file"):
            resolve_path(folder, name, "pool_file")
    with pytest.raises(InvalidInput, match="DUBITO_POOLS"):
        resolve_path(None, "rows.npy", "pool_file")
