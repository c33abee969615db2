"""A fit, a request, a file and a DataFrame read a value in the same way."""

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
VALUES = {  # of columns, without missing values
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
IGNORED = {  # columns that a fit leaves out
    "id": np.arange(N),
    "waited": pd.to_timedelta(np.arange(N), "min"),
    "month": pd.period_range("2020-01", periods=N, freq="M"),
    "clock": [dt.time(i % 24) for i in range(N)],
    "key": [bytes([i]) for i in range(N)],
    "list": [[i] for i in range(N)],
}
FORMS = {
    "pandas": lambda values: pd.DataFrame({"x": values}),
    "nullable": lambda values: pd.DataFrame({"x": values}).convert_dtypes(),
    "arrow": lambda values: pd.DataFrame({"x": values}).convert_dtypes(dtype_backend="pyarrow"),
    "polars": lambda values: pl.DataFrame({"x": values}),
    "category": lambda values: pd.DataFrame({"x": pd.Series(values).astype("category")}),
    "intervals": lambda values: pd.DataFrame({"x": pd.cut(np.array(values, dtype=float), 3)}),
}


def fitted(folder, table, **data):
    parquet.write_table(table.append_column("y", pa.array(Y)), folder / "a.parquet")
    recipe = get_recipe("parquet:a.parquet", "classification", target="y", **data)
    return load(recipe, folder)


def encoded_by_file(content, ending, columns):
    size = sum(map(column_width, columns))
    spec = InputSpec(shape=(size,), minimum=0, maximum=1, columns=columns)
    return np.concatenate(
        [encode_cells(part, columns, "X") for part in open_rows(content, spec, "X", ending).parts()]
    )


def encoded_by_client(frame, columns):
    rows = [json.loads(row) for row in encode_rows(frame, "X").content]
    return encode_objects(rows, columns, "X")


def as_text(cell):
    return cell.isoformat() if isinstance(cell, dt.date) else "NA" if cell is None else str(cell)


def as_csv(table):
    file = io.BytesIO()
    csv.write_csv(pa.table({"x": list(map(as_text, table.column(0).to_pylist()))}), file)
    return file.getvalue()


def forms_of(frame):
    """The rows of a table as requests send them."""
    table = to_table(frame, ["x"])
    return {
        "frame": lambda columns: encoded_by_file(to_parquet(table), ".parquet", columns),
        "client": lambda columns: encoded_by_client(frame, columns),
        "csv": lambda columns: encoded_by_file(as_csv(table), ".csv", columns),
    }


@pytest.mark.parametrize("form", FORMS)
def test_a_fit_and_a_request_read_a_column_in_the_same_way(tmp_path, form):
    for name, values in VALUES.items():
        for missing in (False, True):
            cells = [None if missing and i % 5 == 0 else v for i, v in enumerate(list(values))]
            try:
                frame = FORMS[form](cells)
            except (TypeError, ValueError, OverflowError):  # no such column
                continue
            data = fitted(tmp_path, to_table(frame, ["x"]))
            expected = sorted(np.concatenate([data.train.x, data.test.x]).tolist())
            for sent, encode in forms_of(frame).items():
                assert sorted(encode(data.columns).tolist()) == expected, (name, missing, sent)


@pytest.mark.parametrize("name", sorted(VALUES.keys() - {"code", "number_text"}))
def test_a_fit_of_csv_and_a_typed_request_agree(tmp_path, name):
    frame = pd.DataFrame({"x": VALUES[name]})
    frame.assign(y=Y).to_csv(tmp_path / "a.csv", index=False)
    data = load(get_recipe("csv:a.csv", "classification", target="y"), tmp_path)
    expected = sorted(np.concatenate([data.train.x, data.test.x]).tolist())
    for sent, encode in forms_of(frame).items():
        assert sorted(encode(data.columns).tolist()) == expected, sent


def inspected(folder, frame, **data):
    kind = "csv" if isinstance(frame, str) else "parquet"
    if kind == "csv":
        (folder / "a.csv").write_text(frame)
    else:
        frame.to_parquet(folder / "a.parquet")
    return inspect_source(DataSection(source=f"{kind}:a.{kind}", target="y", **data), folder)


def as_lines(names, *columns):
    return "\n".join([names, *(",".join(map(str, row)) for row in zip(*columns, strict=True))])


def test_equal_numbers_are_one_class_and_one_category(tmp_path, caplog):
    target = [["0", "0.0", "1", "1.0"][i % 4] for i in range(N)]
    codes = [["3", "3.0", "4"][i % 3] for i in range(N)]
    findings = inspected(tmp_path, as_lines("x,y", codes, target))
    assert findings.classes == {"0": 30, "1": 30}
    recipe = get_recipe("csv:a.csv", "classification", target="y", columns={"x": "categorical"})
    data = load(recipe, tmp_path)
    assert data.classes == ("0", "1")
    assert data.columns[0].categories == ("3", "4")
    assert "column x: '3' and '3.0' are one category" in caplog.text
    cells = ["3", "3.0", 3, 3.0, "03"]
    x = encode_objects([{"x": cell} for cell in cells], data.columns, "inputs")
    assert x[:, 0].tolist() == [1, 1, 1, 1, 0]


@pytest.mark.parametrize("other", ["False", "unknown"])
def test_spellings_of_a_boolean_are_one_class_and_one_category(tmp_path, other):
    cells = ["True", "TRUE", "true", other]
    texts = [cells[i % 4] for i in range(N)]
    columns = {"categories": texts, "target": texts}
    name = other.replace("F", "f")
    for kind in ("csv", "parquet"):
        (tmp_path / "a.csv").write_text(as_lines(",".join(columns), *columns.values()))
        pd.DataFrame(columns).to_parquet(tmp_path / "a.parquet")
        data = load(get_recipe(f"{kind}:a.{kind}", "classification", target="target"), tmp_path)
        assert data.classes == data.columns[0].categories == tuple(sorted([name, "true"]))
        x = encode_objects([{"categories": cell} for cell in [*cells, True]], data.columns, "X")
        true = data.classes.index("true")
        assert x.argmax(axis=1).tolist() == [true, true, true, 1 - true, true]
        sent = encoded_by_file("\n".join(["categories", *cells]).encode(), ".csv", data.columns)
        assert sent.tolist() == x[:4].tolist()


def test_unicode_forms_are_one_class_and_one_category(tmp_path, caplog):
    texts = [["caf\u00e9", "cafe\u0301", "tea"][i % 3] for i in range(N)]
    table = pd.DataFrame({"x": texts, "y": texts})
    for frame in (as_lines("x,y", texts, texts), table, table.astype("category")):
        assert inspected(tmp_path, frame).classes == {"caf\u00e9": 40, "tea": 20}
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
def test_spellings_of_one_category_cause_a_note(tmp_path, values):
    texts = [values[i % len(values)] for i in range(N)]
    (column,) = inspected(tmp_path, as_lines("x,y", texts, Y)).columns
    assert column.notes == ["some categories differ only in their spelling"]
    others = ["1", "0", "yes", "2"]
    (column,) = inspected(tmp_path, as_lines("x,y", [others[i % 4] for i in range(N)], Y)).columns
    assert column.notes == []


def test_a_category_type_of_integers_is_categorical_in_files_of_pandas(tmp_path):
    frame = pd.DataFrame({"x": pd.Series(np.arange(N) % 3, dtype="category"), "y": Y})
    assert inspected(tmp_path, frame).columns[0].kind == "categorical"
    data = load(get_recipe("parquet:a.parquet", "classification", target="y"), tmp_path)
    assert data.columns[0].categories == ("0", "1", "2")


@pytest.mark.parametrize("first", [2**60, 2**63])
def test_integers_beyond_float64_are_compared_as_integers(tmp_path, first):
    numbers = [first + i for i in range(N)]
    kinds = [[first + i % 3 for i in range(N)], numbers]
    table = pd.DataFrame({"few": kinds[0], "account": kinds[1], "y": Y})
    decimals = table.map(Decimal)
    for frame in (table, decimals, as_lines("few,account,y", *kinds, Y)):
        few, account = inspected(tmp_path, frame).columns
        assert (few.kind, few.reason) == ("categorical", "3 categories")
        assert (account.kind, account.reason[:33]) == (
            "ignored",
            "an id or free text: 60 different ",
        )


def test_a_date_format_reads_whole_numbers_as_dates(tmp_path):
    days = [f"{DAY + dt.timedelta(days=i):%Y%m%d}" for i in range(N)]
    dated = {"target": "y", "date_format": "%Y%m%d"}
    for kind in ("csv", "parquet"):
        pd.DataFrame({"x": map(int, days), "y": Y}).to_parquet(tmp_path / "a.parquet")
        (tmp_path / "a.csv").write_text(as_lines("x,y", days, Y))
        data = load(get_recipe(f"{kind}:a.{kind}", "classification", **dated), tmp_path)
        cells = [20240520, "20240520", "2024-05-20"]
        x = encode_objects([{"x": cell} for cell in cells], data.columns, "inputs")
        assert data.columns[0].kind == "time"
        assert (x == x[0]).all()


@pytest.mark.parametrize("offset", ["+02:00", "+02"])
def test_times_with_and_without_an_offset_cause_a_warning(tmp_path, caplog, offset):
    times = [["2024-05-01T10:00", f"2024-05-02T10:00{offset}"][i % 2] for i in range(N)]
    inspected(tmp_path, as_lines("x,y", times, Y))
    assert "column x: 1 of 2 times, such as '2024-05-01T10:00', have no UTC offset" in caplog.text


def test_old_parquet_timestamps_do_not_overflow(tmp_path):
    days = [[dt.datetime(9999, 12, 31), dt.datetime(1500, 1, 1), DAY][i % 3] for i in range(N)]
    table, contents = pa.table({"x": pa.array(days, pa.timestamp("us"))}), []
    for is_int96 in (False, True):
        sink = io.BytesIO()
        parquet.write_table(table, sink, use_deprecated_int96_timestamps=is_int96)
        contents.append(sink.getvalue())
    columns = fitted(tmp_path, table).columns
    expected, x = (encoded_by_file(content, ".parquet", columns) for content in contents)
    assert x.tolist() == expected.tolist()
    (tmp_path / "b.parquet").write_bytes(contents[1])
    (column,) = inspect_source(DataSection(source="parquet:b.parquet"), tmp_path).columns
    assert column.reason == "dates or times, 1500-01-01 to 9999-12-31"


def test_a_dataframe_column_of_several_types_is_refused_by_its_name():
    with pytest.raises(
        InvalidInput, match=r"column x: expected values of one type .*, got float, "
    ):
        to_table(pd.DataFrame({"x": [1, "a", 2.5]}), ["x"])


def test_an_estimator_warns_once_of_the_columns_that_it_leaves_out(tmp_path):
    frame = pd.DataFrame({"x": np.arange(N) % 7 / 3, **IGNORED})
    section = write_rows(frame, Y, "y", list(frame), {"data": None, "start": None}, tmp_path)
    parameters = dict.fromkeys(
        ["method", "network", "start", "posterior", "training", "likelihood", "serving"]
    )
    with pytest.warns(UserWarning, match="ignoring columns id .*categorical") as warned:
        recipe = make_recipe("classification", {**parameters, "random_state": 0}, section, tmp_path)
    assert len(warned) == 1
    assert recipe.data.columns == dict.fromkeys(list(frame)[1:], "ignored")
    assert all(name in str(warned[0].message) for name in list(frame)[1:])


def test_an_estimator_warns_of_numbers_that_it_reads_as_text(tmp_path, caplog):
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
def test_numbers_of_accountants_and_clocks_are_read(tmp_path, texts, numbers):
    cells = [f'"{texts[i % len(texts)]}"' for i in range(N)]
    (tmp_path / "a.csv").write_text(as_lines("x,y", cells, Y))
    data = load(get_recipe("csv:a.csv", "classification", target="y"), tmp_path)
    expected = encode_objects([{"x": number} for number in numbers], data.columns, "X")
    lines = "\n".join(["x", *(f'"{text}"' for text in texts)]).encode()
    assert encoded_by_file(lines, ".csv", data.columns).tolist() == expected.tolist()
    if data.columns[0].written is not None:
        sent = encode_objects([{"x": text} for text in texts], data.columns, "X")
        assert sent.tolist() == expected.tolist()


def test_the_kind_of_a_column_is_an_option_that_codes_suggest(tmp_path, caplog, capsys):
    codes = [f"0{1000 + i % 5}" for i in range(N)]
    with caplog.at_level("INFO", "dubito.training"):
        inspected(tmp_path, as_lines("part,y", [["1234", "12E4"][i % 2] for i in range(N)], Y))
        inspected(tmp_path, as_lines("zip,y", codes, Y))
    assert "column zip: reading '01000' as 1000 (set --column zip=categorical if" in caplog.text
    assert "column part: reading '12E4' as 120000 (set --column part=categ" in caplog.text
    options = ["inspect", "--data", f"csv:{tmp_path / 'a.csv'}", "--json"]
    main([*options, "--column", "zip=categorical"])
    column, _ = json.loads(capsys.readouterr().out)["columns"]
    assert (column["kind"], column["reason"]) == ("categorical", "as configured")
    assert main([*options, "--column", "zip"]) == 2
    assert "--column: expected NAME=KIND" in capsys.readouterr().err


@pytest.mark.parametrize("last", [("Total", "", 1), ("", N + sum(i % 7 for i in range(N)), 1)])
def test_a_totals_row_is_named(tmp_path, last):
    rows = [(["Oslo", "Rome"][i % 2], 1 + i % 7, i % 3) for i in range(N)] + [last]
    lines = as_lines("city,sales,y", *zip(*rows, strict=True))
    (warning,) = inspected(tmp_path, lines).warnings
    assert warning.startswith(f"row {N}, the last, looks like a total (column ")
    assert inspected(tmp_path, lines[: lines.rindex("\n")]).warnings == []
    infinite = as_lines("sales,y", ["inf", *["1"] * (N - 2), "inf"], [i % 3 for i in range(N)])
    assert inspected(tmp_path, infinite).warnings == []


def test_a_random_split_of_times_or_groups_causes_a_warning(tmp_path):
    random = np.random.default_rng(0)
    days = [DAY + dt.timedelta(days=i) for i in range(4 * N)]
    walk = pd.DataFrame({"day": days, "x": random.normal(size=4 * N), "y": np.arange(4 * N) // 9})
    patients = np.repeat(np.arange(N), 4)
    size, label = random.normal(size=N)[patients], (np.arange(N) * 7 % 3)[patients]
    visits = pd.DataFrame({"patient": [f"P{i}" for i in patients], "size": size, "y": label})
    for frame, text in ((walk, "later rows by day; "), (visits, "new groups by patient; ")):
        shuffled = frame.assign(**{frame.columns[0]: random.permutation(frame.iloc[:, 0])})
        (warning,) = (w for w in inspected(tmp_path, frame).warnings if "the split matters" in w)
        assert text in warning
        assert not any("the split" in w for w in inspected(tmp_path, shuffled).warnings)
    keyed = inspected(tmp_path, visits, group="patient")
    assert not any("the split" in w for w in keyed.warnings)


def test_a_list_with_an_empty_text_replaces_the_texts_of_missing_cells(tmp_path):
    countries = [["NA", "DE", ""][i % 3] for i in range(N)]
    (tmp_path / "a.csv").write_text(as_lines("x,y", countries, Y))
    for texts, categories in (([], ("DE",)), ([""], ("DE", "NA"))):
        recipe = get_recipe("csv:a.csv", "classification", target="y", missing_values=texts)
        data = load(recipe, tmp_path)
        assert (data.columns[0].categories, data.columns[0].missing) == (categories, True)
    # An unknown category is not a missing one.
    unknown, missing = encode_objects([{"x": "FR"}, {"x": None}], data.columns, "X")
    assert (unknown.tolist(), missing.tolist()) == ([0, 0, 1, 0], [0, 0, 0, 1])


def test_a_request_can_have_the_columns_that_the_fit_left_out(tmp_path):
    frame = pd.DataFrame({"x": np.arange(N) % 7, **IGNORED})
    ignored = dict.fromkeys(IGNORED, "ignored")
    spec = fitted(tmp_path, to_table(frame, list(frame)), columns=ignored).input
    rows = [json.loads(row) for row in encode_rows(frame.assign(y=Y), "X").content]
    x = encode_objects(rows, spec.columns, "inputs", ignored=spec.ignored)
    alone = [{"x": row["x"]} for row in rows]
    assert (x == encode_objects(alone, spec.columns, "inputs", ignored=spec.ignored)).all()
    with pytest.raises(InvalidInput, match=r"inputs\.0\.z: expected only the columns x"):
        encode_objects([{"x": 1, "z": 0}], spec.columns, "inputs", ignored=spec.ignored)


def test_a_few_cells_that_are_no_dates_are_refused_and_named(tmp_path):
    days = [f"{DAY + dt.timedelta(days=i):%Y-%m-%d}" for i in range(N - 1)]
    (column,) = inspected(tmp_path, as_lines("x,y", [*days, "0000-00-00"], Y)).columns
    assert column.kind == "refused"
    assert "dates or times, like 59 of its 60 values (set data.missing_values" in column.reason
    assert column.reason.endswith("got '0000-00-00' in row 59")


@pytest.mark.parametrize("placeholder", ["1900-01-01", "9999-12-31"])
def test_a_date_far_from_the_others_causes_a_note(tmp_path, placeholder):
    days = [f"{DAY + dt.timedelta(days=i):%Y-%m-%d}" for i in range(N)]
    (column,) = inspected(tmp_path, as_lines("x,y", days, Y)).columns
    assert column.notes == []
    (column,) = inspected(tmp_path, as_lines("x,y", [placeholder, *days[1:]], Y)).columns
    assert column.notes[0].startswith("the first or last is far from the others; if it means miss")


def test_two_digit_years_in_the_future_cause_a_note(tmp_path):
    for year, notes in ((70, []), (50, ["dates in the future, because two-digit years up to 68"])):
        days = [f"{1 + i % 28:02d}/12/{year + i % 9:02d}" for i in range(N)]
        lines = as_lines("x,y", days, Y)
        (column,) = inspected(tmp_path, lines, date_format="%d/%m/%y").columns
        assert [note[:53] for note in column.notes] == notes


def test_text_that_is_nearly_numbers_causes_a_note(tmp_path):
    cells = ["." if i % 3 == 0 else i % 20 / 2 for i in range(N)]
    (column,) = inspected(tmp_path, as_lines("x,y", cells, Y)).columns
    assert "20 different numbers, and '.' (set --missing-value" in column.notes[0]
    frame = pd.DataFrame({"x": [f"{i}.5" for i in range(N)], "y": Y})
    assert inspected(tmp_path, frame).columns[0].notes == ["numbers stored as text (set `numeric`)"]


def test_odd_files_are_read(tmp_path):
    lines = "a, x,y\n" + "".join(f'p\0, "{i % 7},5",{i % 2}\n' for i in range(N))
    (tmp_path / "a.csv").write_bytes(gzip.compress(lines.encode()))
    data = load(get_recipe("csv:a.csv", "classification", target="y", decimal=","), tmp_path)
    assert data.columns[0].categories == ("p\0",)
    assert data.columns[1].mean == pytest.approx(3.5, abs=0.5)


def test_a_rare_class_of_a_small_table_leaves_enough_rows(tmp_path):
    target = ["c", *(["a", "b"][i % 2] for i in range(N - 1))]
    findings = inspected(tmp_path, as_lines("x,y", np.arange(N) % 7, target))
    section = DataSection(source="csv:a.csv", target="y")
    assert load(make_plan(findings, section, None, None).recipe, tmp_path).classes == ("a", "b")


def test_sparse_columns_are_read_and_unknown_types_named():
    sparse = pd.DataFrame({"x": pd.arrays.SparseArray([0, 0, 1.5])})
    assert to_table(sparse, ["x"])["x"].to_pylist() == [0, 0, 1.5]
    wide = pl.DataFrame({"x": pl.Series([1, 2], dtype=pl.Int128)})
    with pytest.raises(InvalidInput, match="column x: expected values of one type"):
        to_table(wide, ["x"])


def test_archives_and_parquet_files_are_refused_as_csv(tmp_path):
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
