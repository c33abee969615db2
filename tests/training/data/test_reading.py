"""Fits, requests, files and DataFrames read values in the same way."""

import bz2
import datetime as dt
import gzip
import io
import json
import lzma
import zipfile
from decimal import Decimal

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from pyarrow import csv, parquet

from dubito.rows import encode_rows
from model_store.artifacts.manifest import InputSpec, column_width
from model_store.errors import InvalidInput
from model_store.inference.frames import to_table
from model_store.sources.columns import encode_cells, encode_objects
from model_store.sources.files import open_rows
from model_store.sources.parquet import to_parquet
from tests.support.recipes import get_recipe
from training.__main__ import main
from training.data import load
from training.data.findings import inspect_source
from training.data.plan import make_plan
from training.estimators.recipes import make_recipe, write_rows
from training.sections import DataSection

N = 60
Y = np.arange(N) % 2
DAY = dt.datetime(2024, 5, 1)
VALUES = {  # cells per column, none missing
    "int": [i % 3 for i in range(N)],
    "large": [9_007_199_254_740_992 + i % 3 for i in range(N)],
    "unsigned": np.array([2**64 - 1 - i % 3 for i in range(N)], dtype=np.uint64),
    "float": [i / 7 for i in range(N)],
    "bool": [i % 3 == 0 for i in range(N)],
    "text": [["Oslo", "Rome", "São Paulo"][i % 3] for i in range(N)],
    "code": [["007", "7", "1E5"][i % 3] for i in range(N)],
    "number_text": [["1", "1.0", "2.50", "2.5"][i % 4] for i in range(N)],
    "decimal": [Decimal(i % 5) / 4 for i in range(N)],
    "date": [(DAY + dt.timedelta(days=i)).date() for i in range(N)],
    "time": [DAY + dt.timedelta(hours=7 * i) for i in range(N)],
    "end": [[dt.date(9999, 12, 31), dt.date(2024, 1, 1)][i % 2] for i in range(N)],
}
IGNORED = {  # columns that a fit ignores
    "id": np.arange(N),
    "waited": pd.to_timedelta(np.arange(N), "min"),
    "month": pd.period_range("2020-01", periods=N, freq="M"),
    "clock": [dt.time(i % 24) for i in range(N)],
    "key": [bytes([i]) for i in range(N)],
    "list": [[i] for i in range(N)],
}
FRAME_TYPES = {
    "pandas": lambda values: pd.DataFrame({"x": values}),
    "nullable": lambda values: pd.DataFrame({"x": values}).convert_dtypes(),
    "arrow": lambda values: pd.DataFrame({"x": values}).convert_dtypes(dtype_backend="pyarrow"),
    "polars": lambda values: pl.DataFrame({"x": values}),
    "category": lambda values: pd.DataFrame({"x": pd.Series(values).astype("category")}),
    "intervals": lambda values: pd.DataFrame({"x": pd.cut(np.array(values, dtype=float), 3)}),
}


def load_table(folder, table, **data):
    parquet.write_table(table.append_column("y", pa.array(Y)), folder / "a.parquet")
    recipe = get_recipe("parquet:a.parquet", "classification", target="y", **data)
    return load(recipe, folder)


def encode_file(content, ending, columns):
    size = sum(map(column_width, columns))
    spec = InputSpec(shape=(size,), minimum=0, maximum=1, columns=columns)
    return np.concatenate(
        [encode_cells(part, columns, "X") for part in open_rows(content, spec, "X", ending).parts()]
    )


def encode_with_client(frame, columns):
    rows = [json.loads(row) for row in encode_rows(frame, "X").content]
    return encode_objects(rows, columns, "X")


def as_text(cell):
    return cell.isoformat() if isinstance(cell, dt.date) else "NA" if cell is None else str(cell)


def as_csv(table):
    file = io.BytesIO()
    csv.write_csv(pa.table({"x": list(map(as_text, table.column(0).to_pylist()))}), file)
    return file.getvalue()


def get_request_encoders(frame):
    """Return a function for each request format that encodes the rows of a frame."""
    table = to_table(frame, ["x"])
    return {
        "frame": lambda columns: encode_file(to_parquet(table), ".parquet", columns),
        "client": lambda columns: encode_with_client(frame, columns),
        "csv": lambda columns: encode_file(as_csv(table), ".csv", columns),
    }


@pytest.mark.parametrize("frame_type", FRAME_TYPES)
def test_fits_and_requests_encode_columns_identically(tmp_path, frame_type):
    for name, values in VALUES.items():
        for missing in (False, True):
            cells = [None if missing and i % 5 == 0 else v for i, v in enumerate(list(values))]
            try:
                frame = FRAME_TYPES[frame_type](cells)
            except (TypeError, ValueError, OverflowError):  # unsupported by this frame type
                continue
            data = load_table(tmp_path, to_table(frame, ["x"]))
            expected = sorted(np.concatenate([data.train.x, data.test.x]).tolist())
            for kind, encode in get_request_encoders(frame).items():
                assert sorted(encode(data.columns).tolist()) == expected, (name, missing, kind)


@pytest.mark.parametrize("name", sorted(VALUES.keys() - {"code", "number_text"}))
def test_csv_fits_and_typed_requests_encode_columns_identically(tmp_path, name):
    frame = pd.DataFrame({"x": VALUES[name]})
    frame.assign(y=Y).to_csv(tmp_path / "a.csv", index=False)
    data = load(get_recipe("csv:a.csv", "classification", target="y"), tmp_path)
    expected = sorted(np.concatenate([data.train.x, data.test.x]).tolist())
    for kind, encode in get_request_encoders(frame).items():
        assert sorted(encode(data.columns).tolist()) == expected, kind


def inspect(folder, frame, **data):
    kind = "csv" if isinstance(frame, str) else "parquet"
    if kind == "csv":
        (folder / "a.csv").write_text(frame)
    else:
        frame.to_parquet(folder / "a.parquet")
    return inspect_source(DataSection(source=f"{kind}:a.{kind}", target="y", **data), folder)


def as_lines(names, *columns):
    return "\n".join([names, *(",".join(map(str, row)) for row in zip(*columns, strict=True))])


def test_equal_numbers_share_one_class_and_category(tmp_path, caplog):
    target = [["0", "0.0", "1", "1.0"][i % 4] for i in range(N)]
    codes = [["3", "3.0", "4"][i % 3] for i in range(N)]
    findings = inspect(tmp_path, as_lines("x,y", codes, target))
    assert findings.classes == {"0": 30, "1": 30}
    recipe = get_recipe("csv:a.csv", "classification", target="y", columns={"x": "categorical"})
    data = load(recipe, tmp_path)
    assert data.classes == ("0", "1")
    assert data.columns[0].categories == ("3", "4")
    assert "column x: '3' and '3.0' are one category" in caplog.text
    cells = ["3", "3.0", 3, 3.0, "03"]
    x = encode_objects([{"x": cell} for cell in cells], data.columns, "inputs")
    assert x[:, 0].tolist() == [1, 1, 1, 1, 0]


@pytest.mark.parametrize("alternative", ["False", "unknown"])
def test_boolean_spellings_share_one_class_and_category(tmp_path, alternative):
    cells = ["True", "TRUE", "true", alternative]
    texts = [cells[i % 4] for i in range(N)]
    columns = {"categories": texts, "target": texts}
    name = alternative.replace("F", "f")
    for kind in ("csv", "parquet"):
        (tmp_path / "a.csv").write_text(as_lines(",".join(columns), *columns.values()))
        pd.DataFrame(columns).to_parquet(tmp_path / "a.parquet")
        data = load(get_recipe(f"{kind}:a.{kind}", "classification", target="target"), tmp_path)
        assert data.classes == data.columns[0].categories == tuple(sorted([name, "true"]))
        x = encode_objects([{"categories": cell} for cell in [*cells, True]], data.columns, "X")
        index = data.classes.index("true")
        assert x.argmax(axis=1).tolist() == [index, index, index, 1 - index, index]
        file_x = encode_file("\n".join(["categories", *cells]).encode(), ".csv", data.columns)
        assert file_x.tolist() == x[:4].tolist()


def test_unicode_forms_share_one_class_and_category(tmp_path, caplog):
    texts = [["caf\u00e9", "cafe\u0301", "tea"][i % 3] for i in range(N)]
    table = pd.DataFrame({"x": texts, "y": texts})
    for frame in (as_lines("x,y", texts, texts), table, table.astype("category")):
        assert inspect(tmp_path, frame).classes == {"caf\u00e9": 40, "tea": 20}
        kind = "csv" if isinstance(frame, str) else "parquet"
        data = load(get_recipe(f"{kind}:a.{kind}", "classification", target="y"), tmp_path)
        assert data.classes == data.columns[0].categories == ("caf\u00e9", "tea")
    assert "column y: 'caf\u00e9' and 'cafe\u0301' are one category" in caplog.text


@pytest.mark.parametrize(
    "values",
    [
        ("True", "False", "1", "0"),
        ("yes", "no", "Y"),
        ("Rome", "Rome\u200b"),
        ("A1", "\uff21\uff11"),
    ],
)
def test_different_spellings_of_a_category_cause_a_note(tmp_path, values):
    texts = [values[i % len(values)] for i in range(N)]
    (column,) = inspect(tmp_path, as_lines("x,y", texts, Y)).columns
    assert column.notes == ["some categories differ only in their spelling"]
    labels = ["1", "0", "yes", "2"]
    (column,) = inspect(tmp_path, as_lines("x,y", [labels[i % 4] for i in range(N)], Y)).columns
    assert column.notes == []


def test_pandas_integer_categories_are_categorical_in_parquet(tmp_path):
    frame = pd.DataFrame({"x": pd.Series(np.arange(N) % 3, dtype="category"), "y": Y})
    assert inspect(tmp_path, frame).columns[0].kind == "categorical"
    data = load(get_recipe("parquet:a.parquet", "classification", target="y"), tmp_path)
    assert data.columns[0].categories == ("0", "1", "2")


@pytest.mark.parametrize("start", [2**60, 2**63])
def test_integers_beyond_float64_are_compared_as_integers(tmp_path, start):
    numbers = [start + i for i in range(N)]
    kinds = [[start + i % 3 for i in range(N)], numbers]
    table = pd.DataFrame({"few": kinds[0], "account": kinds[1], "y": Y})
    decimals = table.map(Decimal)
    for frame in (table, decimals, as_lines("few,account,y", *kinds, Y)):
        code, account = inspect(tmp_path, frame).columns
        assert (code.kind, code.reason) == ("categorical", "3 categories")
        assert (account.kind, account.reason[:33]) == (
            "ignored",
            "an id or free text: 60 different ",
        )


def test_date_format_reads_integers_as_dates(tmp_path):
    days = [f"{DAY + dt.timedelta(days=i):%Y%m%d}" for i in range(N)]
    options = {"target": "y", "date_format": "%Y%m%d"}
    for kind in ("csv", "parquet"):
        pd.DataFrame({"x": map(int, days), "y": Y}).to_parquet(tmp_path / "a.parquet")
        (tmp_path / "a.csv").write_text(as_lines("x,y", days, Y))
        data = load(get_recipe(f"{kind}:a.{kind}", "classification", **options), tmp_path)
        cells = [20240520, "20240520", "2024-05-20"]
        x = encode_objects([{"x": cell} for cell in cells], data.columns, "inputs")
        assert data.columns[0].kind == "time"
        assert (x == x[0]).all()


@pytest.mark.parametrize("offset", ["+02:00", "+02"])
def test_mixed_times_with_and_without_utc_offset_cause_a_warning(tmp_path, caplog, offset):
    times = [["2024-05-01T10:00", f"2024-05-02T10:00{offset}"][i % 2] for i in range(N)]
    inspect(tmp_path, as_lines("x,y", times, Y))
    assert "column x: 1 of 2 times, such as '2024-05-01T10:00', have no UTC offset" in caplog.text


def test_int96_parquet_timestamps_do_not_overflow(tmp_path):
    days = [[dt.datetime(9999, 12, 31), dt.datetime(1500, 1, 1), DAY][i % 3] for i in range(N)]
    table, contents = pa.table({"x": pa.array(days, pa.timestamp("us"))}), []
    for is_int96 in (False, True):
        sink = io.BytesIO()
        parquet.write_table(table, sink, use_deprecated_int96_timestamps=is_int96)
        contents.append(sink.getvalue())
    columns = load_table(tmp_path, table).columns
    expected, x = (encode_file(content, ".parquet", columns) for content in contents)
    assert x.tolist() == expected.tolist()
    (tmp_path / "b.parquet").write_bytes(contents[1])
    (column,) = inspect_source(DataSection(source="parquet:b.parquet"), tmp_path).columns
    assert column.reason == "dates or times, 1500-01-01 to 9999-12-31"


def test_dataframe_column_with_mixed_types_is_rejected_by_name():
    with pytest.raises(
        InvalidInput, match=r"column x: expected values of one type .*, got float, "
    ):
        to_table(pd.DataFrame({"x": [1, "a", 2.5]}), ["x"])


def test_estimator_warns_once_about_ignored_columns(tmp_path):
    frame = pd.DataFrame({"x": np.arange(N) % 7 / 3, **IGNORED})
    section = write_rows(frame, Y, "y", list(frame), {"data": None, "start": None}, tmp_path)
    parameters = dict.fromkeys(
        ["method", "network", "start", "posterior", "training", "likelihood", "serving"]
    )
    with pytest.warns(UserWarning, match="ignoring columns id .*categorical") as records:
        recipe = make_recipe("classification", {**parameters, "random_state": 0}, section, tmp_path)
    assert len(records) == 1
    assert recipe.data.columns == dict.fromkeys(list(frame)[1:], "ignored")
    assert all(name in str(records[0].message) for name in list(frame)[1:])


def test_estimator_warns_about_numbers_stored_as_text(tmp_path, caplog):
    frame = pd.DataFrame({"digits": [str(i % 7) for i in range(N)]})
    section = write_rows(frame, Y, "y", list(frame), {"data": None, "start": None}, tmp_path)
    keys = ["method", "network", "start", "posterior", "training", "likelihood", "serving"]
    parameters = {**dict.fromkeys(keys), "random_state": 0}
    make_recipe("classification", parameters, section, tmp_path)
    assert "column digits: numbers stored as text (set `numeric`)" in caplog.text


@pytest.mark.parametrize(
    ("texts", "numbers"),
    [
        (["($1,234.50)", "$2.00", "-$3"], [-1234.5, 2, -3]),
        (["1,234-", "5.5"], [-1234, 5.5]),
        (["\N{MINUS SIGN}5", "7"], [-5, 7]),
        (["1:02:03", "0:00:30.5"], [3723, 30.5]),
        (["1:30", "0:45"], [5400, 2700]),
        (["1,037", "2,500"], [1037, 2500]),
        (["1,23,456.5", "7"], [123456.5, 7]),
        (["12.9%", ".129", "1"], [0.129, 0.129, 1]),
        (["$1,250.50", "500"], [1250.5, 500]),
    ],
)
def test_accounting_numbers_and_durations_are_read(tmp_path, texts, numbers):
    cells = [f'"{texts[i % len(texts)]}"' for i in range(N)]
    (tmp_path / "a.csv").write_text(as_lines("x,y", cells, Y))
    data = load(get_recipe("csv:a.csv", "classification", target="y"), tmp_path)
    expected = encode_objects([{"x": number} for number in numbers], data.columns, "X")
    lines = "\n".join(["x", *(f'"{text}"' for text in texts)]).encode()
    assert encode_file(lines, ".csv", data.columns).tolist() == expected.tolist()
    if data.columns[0].written is not None:
        x = encode_objects([{"x": text} for text in texts], data.columns, "X")
        assert x.tolist() == expected.tolist()


def test_column_option_sets_kind_and_is_suggested_for_codes(tmp_path, caplog, capsys):
    codes = [f"0{1000 + i % 5}" for i in range(N)]
    with caplog.at_level("INFO", "dubito.training"):
        inspect(tmp_path, as_lines("part,y", [["1234", "12E4"][i % 2] for i in range(N)], Y))
        inspect(tmp_path, as_lines("zip,y", codes, Y))
    assert "column zip: reading '01000' as 1000 (set --column zip=categorical if" in caplog.text
    assert "column part: reading '12E4' as 120000 (set --column part=categ" in caplog.text
    options = ["inspect", "--data", f"csv:{tmp_path / 'a.csv'}", "--json"]
    main([*options, "--column", "zip=categorical"])
    column, _ = json.loads(capsys.readouterr().out)["columns"]
    assert (column["kind"], column["reason"]) == ("categorical", "as configured")
    assert main([*options, "--column", "zip"]) == 2
    assert "--column: expected NAME=KIND" in capsys.readouterr().err


@pytest.mark.parametrize("last_row", [("Total", "", 1), ("", N + sum(i % 7 for i in range(N)), 1)])
def test_totals_row_causes_a_warning(tmp_path, last_row):
    rows = [(["Oslo", "Rome"][i % 2], 1 + i % 7, i % 3) for i in range(N)] + [last_row]
    lines = as_lines("city,sales,y", *zip(*rows, strict=True))
    (warning,) = inspect(tmp_path, lines).warnings
    assert warning.startswith(f"row {N}, the last, looks like a total (column ")
    assert inspect(tmp_path, lines[: lines.rindex("\n")]).warnings == []
    infinite = as_lines("sales,y", ["inf", *["1"] * (N - 2), "inf"], [i % 3 for i in range(N)])
    assert inspect(tmp_path, infinite).warnings == []


def test_random_split_of_time_series_or_groups_causes_a_warning(tmp_path):
    random = np.random.default_rng(0)
    days = [DAY + dt.timedelta(days=i) for i in range(4 * N)]
    walk = pd.DataFrame({"day": days, "x": random.normal(size=4 * N), "y": np.arange(4 * N) // 9})
    patients = np.repeat(np.arange(N), 4)
    size, label = random.normal(size=N)[patients], (np.arange(N) * 7 % 3)[patients]
    visits = pd.DataFrame({"patient": [f"P{i}" for i in patients], "size": size, "y": label})
    for frame, text in ((walk, "later rows by day; "), (visits, "new groups by patient; ")):
        shuffled = frame.assign(**{frame.columns[0]: random.permutation(frame.iloc[:, 0])})
        (warning,) = (w for w in inspect(tmp_path, frame).warnings if "the split matters" in w)
        assert text in warning
        assert not any("the split" in w for w in inspect(tmp_path, shuffled).warnings)
    findings = inspect(tmp_path, visits, group="patient")
    assert not any("the split" in w for w in findings.warnings)


def test_missing_values_with_an_empty_string_replace_the_defaults(tmp_path):
    countries = [["NA", "DE", ""][i % 3] for i in range(N)]
    (tmp_path / "a.csv").write_text(as_lines("x,y", countries, Y))
    for texts, categories in (([], ("DE",)), ([""], ("DE", "NA"))):
        recipe = get_recipe("csv:a.csv", "classification", target="y", missing_values=texts)
        data = load(recipe, tmp_path)
        assert (data.columns[0].categories, data.columns[0].missing) == (categories, True)
    # Unknown categories are not encoded as missing.
    unknown, missing = encode_objects([{"x": "FR"}, {"x": None}], data.columns, "X")
    assert (unknown.tolist(), missing.tolist()) == ([0, 0, 1, 0], [0, 0, 0, 1])


def test_requests_can_contain_columns_that_the_fit_ignored(tmp_path):
    frame = pd.DataFrame({"x": np.arange(N) % 7, **IGNORED})
    ignored = dict.fromkeys(IGNORED, "ignored")
    spec = load_table(tmp_path, to_table(frame, list(frame)), columns=ignored).input
    rows = [json.loads(row) for row in encode_rows(frame.assign(y=Y), "X").content]
    x = encode_objects(rows, spec.columns, "inputs", ignored=spec.ignored)
    reduced_rows = [{"x": row["x"]} for row in rows]
    assert (x == encode_objects(reduced_rows, spec.columns, "inputs", ignored=spec.ignored)).all()
    with pytest.raises(InvalidInput, match=r"inputs\.0\.z: expected only the columns x"):
        encode_objects([{"x": 1, "z": 0}], spec.columns, "inputs", ignored=spec.ignored)


def test_invalid_dates_in_a_date_column_are_shown_with_their_rows(tmp_path):
    days = [f"{DAY + dt.timedelta(days=i):%Y-%m-%d}" for i in range(N - 1)]
    (column,) = inspect(tmp_path, as_lines("x,y", [*days, "0000-00-00"], Y)).columns
    assert column.kind == "refused"
    assert "dates or times, like 59 of its 60 values (set data.missing_values" in column.reason
    assert column.reason.endswith("got '0000-00-00' in row 59")


@pytest.mark.parametrize("placeholder", ["1900-01-01", "9999-12-31"])
def test_outlying_date_causes_a_note(tmp_path, placeholder):
    days = [f"{DAY + dt.timedelta(days=i):%Y-%m-%d}" for i in range(N)]
    (column,) = inspect(tmp_path, as_lines("x,y", days, Y)).columns
    assert column.notes == []
    (column,) = inspect(tmp_path, as_lines("x,y", [placeholder, *days[1:]], Y)).columns
    assert column.notes[0].startswith("the first or last is far from the others; if it means miss")


def test_two_digit_years_in_the_future_cause_a_note(tmp_path):
    for year, notes in ((70, []), (50, ["dates in the future, because two-digit years up to 68"])):
        days = [f"{1 + i % 28:02d}/12/{year + i % 9:02d}" for i in range(N)]
        lines = as_lines("x,y", days, Y)
        (column,) = inspect(tmp_path, lines, date_format="%d/%m/%y").columns
        assert [note[:53] for note in column.notes] == notes


def test_mostly_numeric_text_causes_a_note(tmp_path):
    cells = ["." if i % 3 == 0 else i % 20 / 2 for i in range(N)]
    (column,) = inspect(tmp_path, as_lines("x,y", cells, Y)).columns
    assert "20 different numbers, and '.' (set --missing-value" in column.notes[0]
    frame = pd.DataFrame({"x": [f"{i}.5" for i in range(N)], "y": Y})
    assert inspect(tmp_path, frame).columns[0].notes == ["numbers stored as text (set `numeric`)"]


def test_gzipped_csv_with_spaces_and_null_characters_is_read(tmp_path):
    lines = "a, x,y\n" + "".join(f'p\0, "{i % 7},5",{i % 2}\n' for i in range(N))
    (tmp_path / "a.csv").write_bytes(gzip.compress(lines.encode()))
    data = load(get_recipe("csv:a.csv", "classification", target="y", decimal=","), tmp_path)
    assert data.columns[0].categories == ("p\0",)
    assert data.columns[1].mean == pytest.approx(3.5, abs=0.5)


def test_rare_class_of_a_small_table_is_left_out(tmp_path):
    target = ["c", *(["a", "b"][i % 2] for i in range(N - 1))]
    findings = inspect(tmp_path, as_lines("x,y", np.arange(N) % 7, target))
    section = DataSection(source="csv:a.csv", target="y")
    assert load(make_plan(findings, section, None, None).recipe, tmp_path).classes == ("a", "b")


def test_sparse_columns_are_read_and_unknown_types_are_rejected():
    sparse = pd.DataFrame({"x": pd.arrays.SparseArray([0, 0, 1.5])})
    assert to_table(sparse, ["x"])["x"].to_pylist() == [0, 0, 1.5]
    wide = pl.DataFrame({"x": pl.Series([1, 2], dtype=pl.Int128)})
    with pytest.raises(InvalidInput, match="column x: expected values of one type"):
        to_table(wide, ["x"])


def test_archives_and_parquet_files_are_rejected_as_csv(tmp_path):
    pd.DataFrame({"x": Y, "y": Y}).to_parquet(tmp_path / "a.csv")
    with pytest.raises(InvalidInput, match=r"a CSV file .parquet:a.csv., got a Parquet file"):
        inspect_source(DataSection(source="csv:a.csv"), tmp_path)
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("a.csv", "x,y\n1,2\n")
    with pytest.raises(InvalidInput, match=r"a CSV file .unpack the archive., got a zip archive"):
        inspect_source(DataSection(source="csv:a.zip"), tmp_path)
    for compress, kind in ((bz2.compress, "bzip2"), (lzma.compress, "xz")):
        (tmp_path / "a.csv").write_bytes(compress(b"x,y\n1,2\n"))
        with pytest.raises(InvalidInput, match=f"a CSV or gzip file, got an? {kind} file"):
            inspect_source(DataSection(source="csv:a.csv"), tmp_path)
