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

NAMED = InputSpec(
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


def gathered(pool, first=0):
    """All rows from one on, flat."""
    return np.concatenate(
        [np.asarray(part, dtype=np.float32).reshape(len(part), -1) for part in pool.parts(first)]
    )


def refused(path, spec, match):
    with pytest.raises(InvalidInput, match=match):
        open_rows(path, spec, "pool_file")


def written(tmp_path, kind):
    """The rows as a file of a kind."""
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
def test_rows_are_read_whole_and_from_any_row_on(tmp_path, kind, first):
    pool = open_rows(written(tmp_path, kind), ARRAYS, "pool_file")
    assert pool.rows == 10
    assert gathered(pool, first).tolist() == FLAT[first:].tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_parts_are_no_longer_than_they_may_be(tmp_path, kind):
    pool = open_rows(written(tmp_path, kind), ARRAYS, "pool_file")
    assert [len(part) for part in pool.parts()] == [4, 4, 2]


def test_ids_and_what_is_ignored_are_said(tmp_path):
    npz = open_rows(written(tmp_path, "npz deflated"), ARRAYS, "pool_file")
    assert (npz.ids(), npz.ignored, npz.read_as) == (
        [str(i) for i in range(10)],
        ["other"],
        "the array pool",
    )
    lists = open_rows(written(tmp_path, "parquet lists"), ARRAYS, "pool_file")
    assert (lists.ids(), lists.ignored) == ([f"r{i}" for i in range(10)], ["label"])
    assert lists.read_as == "the column v"
    columns = open_rows(written(tmp_path, "parquet columns"), ARRAYS, "pool_file")
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
def test_a_table_has_the_cells_that_objects_of_a_request_have(tmp_path, kind):
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


def test_a_cell_that_is_no_number_is_named_by_row_and_column(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("width,colour\n" + "1,red\n" * 5 + "wide,red\n")
    pool = open_rows(path, TABLE, "pool_file")
    parts = list(pool.parts(4))
    with pytest.raises(
        InvalidInput, match=r"pool_file\.5\.width: expected a number, or null, got a string"
    ):
        encode_cells(parts[0], COLUMNS, "pool_file", 4)


def test_decimal_commas_are_read_as_such_where_no_number_has_a_point(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("width;colour\n1,5;red\n-0,25;blue\n3;red\n")
    pool = open_rows(path, TABLE, "pool_file")
    assert pool.read_as == "2 columns by name, with decimal commas"
    assert next(pool.parts())["width"] == [1.5, -0.25, 3.0]
    path.write_text("width;colour\n1,5;red\n0.25;blue\n")
    refused(
        path,
        TABLE,
        "pool_file: expected numbers with decimal points or with decimal commas, got both",
    )


@pytest.mark.parametrize("missing", ["n.a.", "."])
def test_a_missing_value_with_a_dot_is_no_decimal_point(tmp_path, missing):
    path = tmp_path / "rows.csv"
    path.write_text(f"width;colour\n1,5;red\n{missing};blue\n")
    pool = open_rows(path, TABLE.model_copy(update={"missing_values": (missing,)}), "pool_file")
    assert next(pool.parts())["width"] == [1.5, None]


def test_a_csv_file_is_read_as_it_is_in_training(tmp_path):
    """Booleans as pandas writes them, blanks around names and cells, what counts as missing, a
    column of ids."""
    path = tmp_path / "rows.csv"
    path.write_text(
        "key, width ,is sold, city,note,note\n007, 1.5,True, Oslo,a,b\n008,?,FALSE,NULL,a,b\n "
        "9,n/a,false,Rome,,\n"
    )
    pool = open_rows(path, NAMED, "pool_file")
    assert pool.ids() == ["007", "008", "9"]
    assert (pool.read_as, pool.ignored) == ("3 columns by name, named by key", ["note", "note"])
    expected = {
        "width": [1.5, None, None],
        "is sold": ["true", "false", "false"],
        "city": ["Oslo", None, "Rome"],
    }
    assert next(pool.parts()) == expected
    path.write_text('width,is sold,city\n"1,5",true,Oslo\n"1,234",true,Oslo\n')
    pool = open_rows(path, NAMED, "pool_file")
    assert pool.read_as == "3 columns by name, with decimal commas"
    assert next(pool.parts())["width"] == [1.5, 1.234]


@pytest.mark.parametrize(
    ("delimiter", "encoding", "before", "point", "none"),
    [
        (",", "utf-8", "", ".", ""),
        (",", "utf-8-sig", " ", ".", "NULL"),
        (";", "cp1252", "", ",", "n/a"),
        ("\t", "utf-16", " ", ".", "?"),
        ("|", "utf-16-le", "", ".", "#N/A"),
        (",", "latin-1", "", ",", "?"),
    ],
)
def test_the_file_that_was_fitted_has_the_same_rows_as_a_pool(
    tmp_path, delimiter, encoding, before, point, none
):
    rng = np.random.default_rng(0)
    names = ["key", "age", "city", "vip", "income", "joined", "label"]
    odd = "Lag\x81" if encoding == "latin-1" else "Köln"
    rows = [
        [
            f"k{i:03d}",
            str(rng.integers(18, 80)),
            [odd, "Oslo", none][i % 3],
            str(i % 4 == 0),
            none if i % 5 == 0 else f"{rng.normal():.2f}".replace(".", point),
            f"2024-05-{1 + i % 28:02d}",
            ["no", "yes"][i % 2],
        ]
        for i in range(40)
    ]
    content = io.StringIO()
    csv.writer(content, delimiter=delimiter).writerows(
        [[before + cell for cell in row] for row in [names, *rows]]
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
    commas = ", with decimal commas" if point == "," else ""
    message = "" if encoding.startswith("utf-8") else f", as {encoding}"
    assert pool.read_as == f"5 columns by name{commas}{message}, named by key"
    assert data.classes == ("no", "yes")


def test_columns_that_are_there_twice_and_rows_without_ids_are_named(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("width,colour,width\n1,red,1\n")
    refused(path, TABLE, r"pool_file\.width: expected one column with that name, got 2")
    path.write_text("id,width,colour\na,1,red\n ,1,red\n")
    with pytest.raises(InvalidInput, match="id: expected an id for each row, got none in row 1"):
        open_rows(path, TABLE, "pool_file").ids()
    path = tmp_path / "rows.parquet"
    cells = [pa.array([1.0, 2.0]), pa.array(["red", "blue"]), pa.array([1.0, 2.0])]
    pq.write_table(pa.Table.from_arrays(cells, names=["width", "colour", "width"]), path)
    refused(path, TABLE, r"pool_file\.width: expected one column with that name, got 2")


@pytest.mark.parametrize(
    ("ids", "found"),
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
def test_ids_are_kept_as_they_are_or_refused_by_row(tmp_path, ids, found):
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"id": ids, "width": [1.0, 2.0], "colour": ["red", "red"]}), path)
    pool = open_rows(path, TABLE, "pool_file")
    if isinstance(found, list):
        assert pool.ids() == found
        return
    with pytest.raises(InvalidInput, match=f"id: expected {found}"):
        pool.ids()


def test_numbers_in_strings_and_an_index_of_pandas_in_parquet(tmp_path):
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
    part = next(open_rows(path, NAMED, "pool_file").parts())
    assert part == {
        "width": [1.5, -2.0, None, None],
        "is sold": ["true", None, "false", "false"],
        "city": ["Oslo"] * 4,
    }
    index = {"__index_level_0__": np.arange(10)}
    pq.write_table(pa.table({**{f"p{i}": FLAT[:, i] for i in range(6)}, **index}), path)
    pool = open_rows(path, ARRAYS, "pool_file")
    assert (pool.ignored, gathered(pool).tolist()) == (["__index_level_0__"], FLAT.tolist())


def test_what_may_be_thousands_or_no_number_is_refused_and_not_guessed(tmp_path):
    path = tmp_path / "rows.csv"
    for cell in ('"1,234"', "1_000"):
        path.write_text(f"width,colour\n{cell},red\n")
        pool = open_rows(path, TABLE, "pool_file")
        with pytest.raises(
            InvalidInput, match=r"pool_file\.0\.width: expected a number, or null, got a string"
        ):
            encode_cells(next(pool.parts()), COLUMNS, "pool_file")


def test_a_file_that_is_cut_off_while_it_is_read_is_told(tmp_path):
    path = written(tmp_path, "npy")
    pool = open_rows(path, ARRAYS, "pool_file")
    parts = pool.parts()
    next(parts)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 100)
    with pytest.raises(
        InvalidInput, match="a whole npy file of numbers, got a file that was truncated"
    ):
        list(parts)


def test_a_zip_s_files_are_rows_in_the_order_of_their_names(tmp_path):
    path, content = tmp_path / "images.zip", png_bytes(X[0].astype(np.uint8))
    names = ("b/2.png", "a.png", "__MACOSX/._a.png", "b/.DS_Store", "b/")
    path.write_bytes(zip_bytes(dict.fromkeys(names, content)))
    pool = open_rows(path, IMAGES, "pool_file")
    assert pool.ids() == ["a.png", "b/2.png"]
    assert [len(part) for part in pool.parts()] == [2]
    refused(path, ARRAYS, "pool_file: expected a zip for a model of images or text alone")


def test_folders_in_a_zip_that_windows_made_are_folders(tmp_path):
    path = tmp_path / "images.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("b\\", "b\\2.png", "b\\Thumbs.db", "__MACOSX\\._2.png", "a.png"):
            info = zipfile.ZipInfo("x")
            info.filename = name
            archive.writestr(info, png_bytes(X[0].astype(np.uint8)))
    pool = open_rows(path, IMAGES, "pool_file")
    assert pool.ids() == ["a.png", "b/2.png"]
    assert [len(part) for part in pool.parts()] == [2]


def test_a_cell_of_a_csv_file_may_be_as_long_as_a_text(tmp_path):
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


def test_files_in_a_column_of_parquet_are_images(tmp_path):
    path = tmp_path / "images.parquet"
    content = png_bytes(X[0].astype(np.uint8))
    pq.write_table(
        pa.table({"image": [{"bytes": content, "path": "a"}] * 3, "label": [0, 1, 2]}), path
    )
    pool = open_rows(path, IMAGES, "pool_file")
    assert next(pool.parts()) == [content] * 3
    assert pool.read_as == "files in the column image"


def test_what_is_no_pool_is_refused_with_the_reason(tmp_path):
    for ending in (".npy", ".npz", ".parquet", ".zip"):
        (tmp_path / f"broken{ending}").write_bytes(b"rubbish" * 100)
        spec = IMAGES if ending == ".zip" else ARRAYS
        refused(
            tmp_path / f"broken{ending}", spec, f"pool_file: expected a whole {ending[1:]} file"
        )
    (tmp_path / "rows.xlsx").write_bytes(b"")
    refused(tmp_path / "rows.xlsx", ARRAYS, r"a file that ends in \.npy, .*got \.xlsx")
    np.save(tmp_path / "wide.npy", np.zeros((3, 7)))
    refused(tmp_path / "wide.npy", ARRAYS, r"shape \(N, 2, 3\) or \(N, 6\), got shape \(3, 7\)")
    np.save(tmp_path / "none.npy", np.zeros((0, 6)))
    refused(tmp_path / "none.npy", ARRAYS, "at least one row, got none")
    (tmp_path / "objects.npy").write_bytes(npy_header((3,), "|O"))
    refused(tmp_path / "objects.npy", ARRAYS, "a whole npy file of numbers")
    members = {"x.npy": npy_bytes(FLAT), "ids.npy": npy_header((10,), "|O")}
    (tmp_path / "objects.npz").write_bytes(zip_bytes(members))
    refused(
        tmp_path / "objects.npz",
        ARRAYS,
        "ids: expected an array of numbers or strings, got one of Python objects",
    )
    np.savez(tmp_path / "two.npz", a=FLAT, b=FLAT)
    refused(
        tmp_path / "two.npz", ARRAYS, "one array of rows, or one of several that is named pool or"
    )
    pq.write_table(pa.table({"a": [1.0]}), tmp_path / "narrow.parquet")
    refused(
        tmp_path / "narrow.parquet",
        ARRAYS,
        "one column of lists of 6 numbers, or 6 columns of numbers",
    )
    refused(
        tmp_path / "narrow.parquet",
        TABLE,
        r"pool_file\.width: expected a column with that name, got columns a",
    )
    (tmp_path / "ragged.csv").write_text("width,colour\n1,red\n2\n")
    refused(
        tmp_path / "ragged.csv", TABLE, r"pool_file\.1: expected 2 cells, as the first line, got 1"
    )
    for text in (
        'width,colour\n1,red\n2,"red\n3,red\n',
        'width,colour\n1,red\n2,"',
        'width,"colour\n1,red\n',
    ):
        (tmp_path / "open.csv").write_text(text)
        refused(
            tmp_path / "open.csv",
            TABLE,
            "with closed quotes, got an open quote at the end",
        )
    (tmp_path / "open.csv").write_text('width,colour\n1,"red\n2,red\n3,"red\n')
    refused(tmp_path / "open.csv", TABLE, "got an unmatched quote in the row that starts in line 2")
    (tmp_path / "open.csv").write_text('sep=,\nwidth,colour\n1,"red\n2,red\n3,"red\n')
    refused(tmp_path / "open.csv", TABLE, "got an unmatched quote in the row that starts in line 3")
    (tmp_path / "open.csv").write_text('width,colour\n1,"' + "2 red\n" * 3_000_000)
    refused(tmp_path / "open.csv", TABLE, "with closed quotes, got field larger than")


@pytest.mark.parametrize("encoding", ["DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY"])
def test_parquet_texts_in_delta_encodings_are_read(tmp_path, encoding):
    path, texts = tmp_path / "rows.parquet", [f"text {n % 7}" for n in range(600)]
    table = pa.table({"width": [1.0] * 600, "is sold": texts, "city": texts, "key": texts})
    names = {"is sold": encoding, "city": encoding, "key": encoding}
    pq.write_table(table, path, use_dictionary=False, column_encoding=names)
    pool = open_rows(path, NAMED, "pool_file")
    assert [text for part in pool.parts() for text in part["city"]] == texts
    assert [text for part in pool.id_parts() for text in part] == texts


def test_errors_of_parquet_files_have_the_reason_of_pyarrow(tmp_path, monkeypatch):
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({f"p{i}": FLAT[:, i] for i in range(6)}), path)
    refused(
        path.with_suffix(".absent.parquet"), ARRAYS, "a readable parquet file, got No such file"
    )
    content = path.read_bytes()
    path.write_bytes(content[:-8])
    refused(path, ARRAYS, "a whole parquet file, got Parquet magic bytes not found in footer")

    def fail(error):
        monkeypatch.setattr(pq.ParquetFile, "__init__", Mock(side_effect=error))

    fail(OSError("Not yet implemented: Unsupported encoding."))
    refused(path, ARRAYS, "a supported parquet file, got Not yet implemented: Unsupported encoding")
    fail(pa.ArrowMemoryError("malloc of size 10 failed"))
    with pytest.raises(MemoryError):
        open_rows(path, ARRAYS, "pool_file")


def test_booleans_are_no_numbers_in_parquet_files(tmp_path):
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"width": [True, None], "colour": ["red", "blue"]}), path)
    part = next(open_rows(path, TABLE, "pool_file").parts())
    with pytest.raises(InvalidInput, match=r"pool_file\.0\.width: expected a number, .* a boolean"):
        encode_cells(part, COLUMNS, "pool_file")
    pq.write_table(pa.table({f"p{i}": FLAT[:, i] > 1 for i in range(6)}), path)
    refused(path, ARRAYS, "6 columns of numbers, got 0 of lists and 0 of numbers")
    pq.write_table(pa.table({"v": (FLAT > 1).tolist()}), path)
    refused(path, ARRAYS, "one column of lists of 6 numbers, .* got 0 of lists")


def test_a_list_of_another_length_is_named(tmp_path):
    path = tmp_path / "ragged.parquet"
    pq.write_table(pa.table({"v": [[1.0] * 6] * 5 + [[1.0] * 5] + [[1.0] * 7]}), path)
    pool = open_rows(path, ARRAYS, "pool_file")
    with pytest.raises(InvalidInput, match=r"pool_file\.5: expected 6 numbers, got 5"):
        list(pool.parts())


def test_a_truncated_npz_is_told_where_it_ends(tmp_path):
    np.savez_compressed(tmp_path / "rows.npz", x=np.random.default_rng(0).normal(size=(1000, 6)))
    content = bytearray((tmp_path / "rows.npz").read_bytes())
    content[2000] ^= 255
    (tmp_path / "rows.npz").write_bytes(content)
    pool = open_rows(tmp_path / "rows.npz", ARRAYS, "pool_file")
    with pytest.raises(InvalidInput, match="a whole npz file"):
        list(pool.parts())


def test_ids_that_repeat_are_refused_and_named():
    check_ids(["a", "b"], 2)
    with pytest.raises(InvalidInput, match="an id for each of the 3 pool rows, got 2"):
        check_ids(["a", "b"], 3)
    with pytest.raises(InvalidInput, match="duplicates such as 'b'"):
        check_ids(["a", "b", "c", "b"], 4)


def test_names_stay_in_the_operator_s_folder(tmp_path):
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
