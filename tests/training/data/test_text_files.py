import gzip
import json

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from model_store.sources.columns import encode_objects
from tests.support.recipes import content_with, get_recipe
from tests.support.refusals import assert_invalid
from training.data import load
from training.data.findings import inspect_source
from training.recipe import validate
from training.sections import DataSection

ROWS = 60
RNG = np.random.default_rng(0)
CITY = [["Köln", "Málaga", "Rome"][i % 3] for i in range(ROWS)]
WEIGHT = [round(float(w), 2) for w in RNG.uniform(1, 90, ROWS)]
DAYS = [str(np.datetime64("2022-02-03") + 11 * i) for i in range(ROWS)]
LABEL = [["no", "yes"][i % 2] for i in range(ROWS)]


def get_lines(delimiter=",", comma=False, **columns):
    columns = columns or {"city": CITY, "weight": WEIGHT}
    columns = {**columns, "label": LABEL}
    rows = [delimiter.join(columns)]
    point = "," if comma else "."
    cells = [
        ["" if c is None else str(c).replace(".", point) for c in column]
        for column in columns.values()
    ]
    rows += [delimiter.join(row) for row in zip(*cells, strict=True)]
    return "\n".join(rows) + "\n"


def read(folder, content, **data):
    (folder / "a.csv").write_bytes(content if isinstance(content, bytes) else content.encode())
    return load(get_recipe("csv:a.csv", **{"target": "label", **data}), folder)


@pytest.mark.parametrize(
    "encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "cp1252"]
)
@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_encodings_and_delimiters_are_recognised(tmp_path, encoding, delimiter):
    expected = read(tmp_path, get_lines())
    data = read(tmp_path, get_lines(delimiter).encode(encoding))
    assert data.digest() == expected.digest()
    assert data.columns[0].categories == ("Köln", "Málaga", "Rome")


@pytest.mark.parametrize("delimiter", [";", "\t"])
def test_decimal_commas_are_recognised_or_set(tmp_path, delimiter):
    expected = read(tmp_path, get_lines())
    assert read(tmp_path, get_lines(delimiter, comma=True)).digest() == expected.digest()
    assert (
        read(tmp_path, get_lines(delimiter, comma=True), decimal=",").digest() == expected.digest()
    )
    prices = [f"{1000 + i}.{i % 10}" for i in range(ROWS)]
    grouped_prices = [f"1.{text[1:4]},{text[5:]}" for text in prices]
    plain_data = read(tmp_path, get_lines(price=prices))
    grouped_data = read(tmp_path, get_lines(";", price=grouped_prices), decimal=",", thousands=".")
    assert np.array_equal(grouped_data.train.x, plain_data.train.x)


@pytest.mark.parametrize("thousands", [None, "."])
@pytest.mark.parametrize("kind", [None, "numeric"])
def test_decimal_points_among_decimal_commas_are_rejected(tmp_path, thousands, kind):
    cell = "1.5" if thousands is None else "1234.567"
    price = [*(f"{i},5" for i in range(ROWS - 1)), cell]
    columns = {} if kind is None else {"price": kind}
    text = get_lines(";", price=price)
    assert_invalid(
        lambda: read(tmp_path, text, decimal=",", thousands=thousands, columns=columns),
        f"{cell!r} in row {ROWS - 1}",
    )


def test_decimal_commas_elsewhere_identify_thousands_points(tmp_path, caplog):
    caplog.set_level("INFO", "dubito.training")
    amounts = [200 + 43 * i for i in range(ROWS)]
    grouped = [f"{amount:,}".replace(",", ".") for amount in amounts]
    shares = [f"{i},25" for i in range(ROWS)]
    data = read(tmp_path, get_lines(";", amount=grouped, share=shares))
    assert "decimal commas and points between thousands" in caplog.text
    amount = data.columns[0]
    assert amount.mean == pytest.approx(np.mean(amounts), rel=0.1)
    assert (amount.written.decimal, amount.written.thousands) == (",", ".")
    assert data.columns[1].written is None
    rows = [{"amount": "1.234", "share": 2.25}, {"amount": 1234, "share": 2.25}]
    assert len(set(map(tuple, encode_objects(rows, data.columns, "inputs").tolist()))) == 1


@pytest.mark.parametrize(("mark", "decimal"), [(".", ","), (",", ".")])
@pytest.mark.parametrize("delimiter", [";", "\t"])
def test_ambiguous_thousands_separators_require_a_setting(tmp_path, delimiter, mark, decimal):
    amounts = [200 + 43 * i for i in range(ROWS)]
    text = get_lines(delimiter, amount=[f"{amount:,}".replace(",", mark) for amount in amounts])
    assert_invalid(
        lambda: read(tmp_path, text), f"'1{mark}017' and '200'", f'data.decimal = "{decimal}"'
    )
    mean = read(tmp_path, text, decimal=decimal, thousands=mark).columns[0].mean
    assert mean == pytest.approx(np.mean(amounts), rel=0.1)
    assert read(tmp_path, text, decimal=mark).columns[0].mean < 1000


def test_leading_zero_identifies_decimal_commas_in_comma_separated_files(tmp_path):
    text = get_lines(share=[f'"{i % 3},{100 + i}"' for i in range(ROWS)])
    assert read(tmp_path, text).columns[0].mean < 3


def test_points_are_decimal_if_other_columns_have_decimal_points(tmp_path):
    amounts = [200 + 43 * i for i in range(ROWS)]
    text = get_lines(";", amount=[f"{amount:,}".replace(",", ".") for amount in amounts], x=WEIGHT)
    assert read(tmp_path, text).columns[0].mean < 1000


def test_cells_can_contain_line_breaks(tmp_path):
    notes = ['"a ""b""\nc"', '"a,\nb" ', '"\n"', '"a\n\nb"']
    text = get_lines(note=[notes[i % 4] for i in range(ROWS)])
    assert read(tmp_path, text).columns[0].categories == ("a\n\nb", 'a "b"\nc', "a,\nb")


def test_unusual_formats_are_logged_and_can_be_configured(tmp_path, caplog):
    caplog.set_level("INFO", "dubito.training")
    read(tmp_path, get_lines(";", comma=True).encode("cp1252"))
    assert "reading a.csv as cp1252" in caplog.text
    assert "cells separated by ';'" in caplog.text
    assert "decimal commas" in caplog.text
    data = read(tmp_path, get_lines().encode("cp1250", "replace"), encoding="cp1250", delimiter=",")
    assert "Köln" in data.columns[0].categories
    assert_invalid(
        lambda: read(tmp_path, get_lines().encode("cp1252"), encoding="utf-8"),
        "bytes that are not utf-8",
    )
    assert_invalid(
        lambda: read(tmp_path, get_lines(), encoding="klingon"), "a readable CSV file", "klingon"
    )


@pytest.mark.parametrize(
    ("format_day", "date_format"),
    [
        (lambda d: d, None),
        (lambda d: d.replace("-", "/"), "%Y/%m/%d"),
        (lambda d: ".".join(reversed(d.split("-"))), "%d.%m.%Y"),
        (lambda d: ".".join(reversed(d.split("-"))) + " 00:00", "%d.%m.%Y"),
        (lambda d: "/".join(reversed(d.split("-"))), "%d/%m/%Y"),
        (lambda d: "{1}/{2}/{0}".format(*d.split("-")), "%m/%d/%Y"),
        (lambda d: d + "T00:00:00Z", None),
        (lambda d: d + " 02:00+02:00", None),
    ],
    ids=["iso", "slashes", "german", "with time", "day first", "month first", "utc", "offset"],
)
def test_training_and_service_encode_dates_identically(tmp_path, format_day, date_format):
    data = read(tmp_path, get_lines(day=[format_day(day) for day in DAYS]))
    (column,) = data.columns
    assert (column.kind, column.cycles, column.written) == ("time", ("year", "week"), date_format)
    rows = json.loads(json.dumps([{"day": day} for day in DAYS]))
    x = encode_objects(rows, data.columns, "inputs")
    assert (
        encode_objects([{"day": format_day(day)} for day in DAYS], data.columns, "inputs").tolist()
        == x.tolist()
    )
    assert sorted(np.concatenate([data.train.x, data.test.x]).tolist()) == sorted(x.tolist())
    seconds = np.array(DAYS, "M8[s]").astype(float)
    weeks = 2 * np.pi * seconds / (7 * 86400)
    assert x[:, 0] == pytest.approx((seconds - column.mean) / column.std, abs=1e-6)
    assert x[:, 3:] == pytest.approx(np.stack([np.sin(weeks), np.cos(weeks)], 1), abs=1e-5)


def test_times_of_day_have_a_cycle_and_a_missing_indicator(tmp_path):
    times = [None if i % 7 == 0 else f"2024-05-01T{i % 24:02d}:30" for i in range(ROWS)]
    data = read(tmp_path, get_lines(at=times))
    (column,) = data.columns
    assert (column.cycles, column.indicator, data.shape) == (("day",), True, (4,))
    rows = encode_objects([{"at": None}, {"at": "2024-05-01 06:00"}], data.columns, "x")
    assert rows[0].tolist() == [0, 0, 0, 1]
    assert rows[1, 1:] == pytest.approx([1, 0, 0], abs=1e-6)


def test_parquet_and_csv_dates_are_encoded_identically(tmp_path):
    expected = read(tmp_path, get_lines(day=DAYS))
    for kind in (pa.date32(), pa.timestamp("ns"), pa.timestamp("s", "UTC")):
        days = pa.array(np.array(DAYS, "M8[D]")).cast(kind)
        parquet.write_table(pa.table({"day": days, "label": LABEL}), tmp_path / "a.parquet")
        assert (
            load(get_recipe("parquet:a.parquet", target="label"), tmp_path).digest()
            == expected.digest()
        )


def test_ambiguous_dates_are_rejected_without_a_date_format(tmp_path):
    days = [f"0{1 + i % 9}/0{1 + i % 7}/2024" for i in range(ROWS)]
    assert_invalid(
        lambda: read(tmp_path, get_lines(day=days)),
        "column day: expected unambiguous dates (set data.date_format",
        "got '08/01/2024'",  # the first ambiguous date
    )
    day_first = read(tmp_path, get_lines(day=days), date_format="%d/%m/%Y")
    month_first = read(tmp_path, get_lines(day=days), date_format="%m/%d/%Y")
    assert day_first.columns[0].mean != month_first.columns[0].mean
    assert (day_first.columns[0].written, month_first.columns[0].written) == (
        "%d/%m/%Y",
        "%m/%d/%Y",
    )
    assert (
        read(tmp_path, get_lines(day=days), columns={"day": "categorical"}).columns[0].kind
        == "categorical"
    )
    bad_days = [*days[:-1], "soon"]
    message = "column day: expected dates or times, such as 2024-05-01"
    assert_invalid(
        lambda: read(tmp_path, get_lines(day=bad_days), columns={"day": "time"}),
        message,
        "got 'soon' in row 59",
    )


def test_dates_with_equal_day_and_month_need_no_date_format(tmp_path):
    days = [f"0{1 + i % 9}/0{1 + i % 9}/2024" for i in range(ROWS)]
    (column,) = read(tmp_path, get_lines(day=days)).columns
    assert (column.kind, column.written) == ("time", None)


def test_date_format_can_contain_names_and_times_of_day(tmp_path):
    texts = [f"{np.datetime64(day).item():%a %d %b %Y %H:%M}" for day in DAYS]
    data = read(tmp_path, get_lines(day=texts), date_format="%a %d %b %Y %H:%M")
    (column,) = data.columns
    rows = encode_objects(
        [{"day": "Tue 07 May 2024 13:30"}, {"day": "2024-05-07T13:30"}], data.columns, "x"
    )
    assert column.written == "%a %d %b %Y %H:%M"
    assert rows[0].tolist() == rows[1].tolist()
    texts[3] = "soon"
    assert (
        read(tmp_path, get_lines(day=texts), date_format="%a %d %b %Y %H:%M").columns[0].kind
        == "categorical"
    )


@pytest.mark.parametrize("style", ["%d/%m", "%H:%M", "%d%d", "%Y-%Q", "%", "soon", ""])
def test_date_format_without_a_complete_date_is_rejected(style):
    assert_invalid(
        lambda: validate(
            content_with(data={"source": "csv:a.csv", "target": "label", "date_format": style}), "r"
        ),
        "r: data.date_format: expected a strptime format with year, month and day",
    )


def test_rare_categories_are_merged_if_there_are_many(tmp_path, caplog):
    caplog.set_level("INFO", "dubito.training")
    rows = 2000
    names = [f"k{i}" if i % 2 else f"often{i % 20}" for i in range(rows)]
    content = "name,label\n" + "".join(
        f"{name},{'ab'[i // 3 % 2]}\n" for i, name in enumerate(names)
    )
    (column,) = read(tmp_path, content).columns
    assert column.categories == tuple(sorted(f"often{i}" for i in range(0, 20, 2)))
    assert "merging all but the 10 most frequent" in caplog.text


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("delimiter", [",", ";"])
def test_sep_line_sets_the_delimiter_and_is_not_a_row(tmp_path, delimiter, end):
    expected = read(tmp_path, get_lines())
    content = f"sep={delimiter}\n" + get_lines(delimiter)
    assert read(tmp_path, content.replace("\n", end)).digest() == expected.digest()
    assert read(tmp_path, "\ufeff" + content, delimiter=delimiter).digest() == expected.digest()


@pytest.mark.parametrize("delimiter", [",", ";"])
def test_trailing_delimiters_add_no_columns(tmp_path, delimiter):
    expected = read(tmp_path, get_lines())
    text = get_lines(delimiter).replace("\n", f"{delimiter}{delimiter}\n")
    assert read(tmp_path, text).digest() == expected.digest()
    short_header = text.replace(f"{delimiter}{delimiter}\n", "\n", 1)
    assert read(tmp_path, short_header).digest() == expected.digest()
    empty_row = text + f"{delimiter * 4}\n"
    assert read(tmp_path, empty_row).digest() == expected.digest()
    assert_invalid(
        lambda: read(tmp_path, text + f"Rome{delimiter}1{delimiter}no{delimiter}x\n"), "3 cells"
    )


def test_csv_can_be_gzipped_and_excel_files_are_rejected(tmp_path):
    expected = read(tmp_path, get_lines())
    compressed = gzip.compress(get_lines().encode())
    recipe = get_recipe("csv:b.csv.gz", target="label")
    (tmp_path / "b.csv.gz").write_bytes(compressed)
    assert load(recipe, tmp_path).digest() == expected.digest()
    for content in (compressed[:-20], compressed[:10] + b"x" * 20):
        (tmp_path / "b.csv.gz").write_bytes(content)
        assert_invalid(lambda: load(recipe, tmp_path), "data.source: expected a readable CSV file")
    for source in ("csv:b.xlsx", "parquet:b.XLSX"):
        (tmp_path / source.partition(":")[2]).write_bytes(b"PK\x03\x04")
        message = "a CSV or Parquet file (save the sheet as `CSV UTF-8`), got an Excel workbook"
        assert_invalid(
            lambda source=source: load(get_recipe(source, target="label"), tmp_path), message
        )


def test_numeric_text_in_parquet_can_be_a_target_or_numeric_column(tmp_path):
    table = pa.table({"x": ["1.5", "2", None] * 20, "y": [str(i) for i in range(ROWS)]})
    parquet.write_table(table, tmp_path / "a.parquet")
    section = DataSection(source="parquet:a.parquet", target="y", columns={"x": "numeric"})
    findings = inspect_source(section, tmp_path, "regression")
    assert findings.targets.tolist() == [*range(ROWS)]
