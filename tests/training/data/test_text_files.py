import gzip
import json

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from model_store.sources.columns import encode_objects
from tests.support.recipes import content_with, get_recipe
from tests.support.refusals import refused
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
    large = [f"{1000 + i}.{i % 10}" for i in range(ROWS)]
    grouped = [f"1.{text[1:4]},{text[5:]}" for text in large]
    plain = read(tmp_path, get_lines(price=large))
    read_so = read(tmp_path, get_lines(";", price=grouped), decimal=",", thousands=".")
    assert np.array_equal(read_so.train.x, plain.train.x)


@pytest.mark.parametrize("thousands", [None, "."])
@pytest.mark.parametrize("kind", [None, "numeric"])
def test_points_among_decimal_commas_are_refused(tmp_path, thousands, kind):
    odd = "1.5" if thousands is None else "1234.567"
    price = [*(f"{i},5" for i in range(ROWS - 1)), odd]
    columns = {} if kind is None else {"price": kind}
    text = get_lines(";", price=price)
    refused(
        lambda: read(tmp_path, text, decimal=",", thousands=thousands, columns=columns),
        f"{odd!r} in row {ROWS - 1}",
    )


def test_points_between_thousands_are_known_by_decimal_commas_elsewhere(tmp_path, caplog):
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


@pytest.mark.parametrize(("mark", "other"), [(".", ","), (",", ".")])
@pytest.mark.parametrize("delimiter", [";", "\t"])
def test_marks_that_may_be_between_thousands_are_refused_until_a_person_says(
    tmp_path, delimiter, mark, other
):
    amounts = [200 + 43 * i for i in range(ROWS)]
    text = get_lines(delimiter, amount=[f"{amount:,}".replace(",", mark) for amount in amounts])
    refused(lambda: read(tmp_path, text), f"'1{mark}017' and '200'", f'data.decimal = "{other}"')
    thousands = read(tmp_path, text, decimal=other, thousands=mark).columns[0].mean
    assert thousands == pytest.approx(np.mean(amounts), rel=0.1)
    assert read(tmp_path, text, decimal=mark).columns[0].mean < 1000


def test_points_are_decimal_if_other_columns_have_decimal_points(tmp_path):
    amounts = [200 + 43 * i for i in range(ROWS)]
    rest = get_lines(";", amount=[f"{amount:,}".replace(",", ".") for amount in amounts], x=WEIGHT)
    assert read(tmp_path, rest).columns[0].mean < 1000


def test_cells_can_have_line_breaks(tmp_path):
    notes = ['"a ""b""\nc"', '"a,\nb" ', '"\n"', '"a\n\nb"']
    text = get_lines(note=[notes[i % 4] for i in range(ROWS)])
    assert read(tmp_path, text).columns[0].categories == ("a\n\nb", 'a "b"\nc', "a,\nb")


def test_what_is_not_usual_is_said_and_a_recipe_may_say_otherwise(tmp_path, caplog):
    caplog.set_level("INFO", "dubito.training")
    read(tmp_path, get_lines(";", comma=True).encode("cp1252"))
    assert "reading a.csv as cp1252" in caplog.text
    assert "cells separated by ';'" in caplog.text
    assert "decimal commas" in caplog.text
    data = read(tmp_path, get_lines().encode("cp1250", "replace"), encoding="cp1250", delimiter=",")
    assert "Köln" in data.columns[0].categories
    refused(
        lambda: read(tmp_path, get_lines().encode("cp1252"), encoding="utf-8"),
        "bytes that are not utf-8",
    )
    refused(
        lambda: read(tmp_path, get_lines(), encoding="klingon"), "a readable CSV file", "klingon"
    )


@pytest.mark.parametrize(
    ("written", "form"),
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
    ids=["iso", "slashes", "german", "with a time", "day first", "month first", "zulu", "offset"],
)
def test_dates_are_a_time_axis_and_the_service_reads_them_as_training_did(tmp_path, written, form):
    data = read(tmp_path, get_lines(day=[written(day) for day in DAYS]))
    (column,) = data.columns
    assert (column.kind, column.cycles, column.written) == ("time", ("year", "week"), form)
    posted = json.loads(json.dumps([{"day": day} for day in DAYS]))
    result = encode_objects(posted, data.columns, "inputs")
    assert (
        encode_objects([{"day": written(day)} for day in DAYS], data.columns, "inputs").tolist()
        == result.tolist()
    )
    assert sorted(np.concatenate([data.train.x, data.test.x]).tolist()) == sorted(result.tolist())
    seconds = np.array(DAYS, "M8[s]").astype(float)
    weeks = 2 * np.pi * seconds / (7 * 86400)
    assert result[:, 0] == pytest.approx((seconds - column.mean) / column.std, abs=1e-6)
    assert result[:, 3:] == pytest.approx(np.stack([np.sin(weeks), np.cos(weeks)], 1), abs=1e-5)


def test_times_of_day_have_a_cycle_and_missing_ones_an_indicator(tmp_path):
    times = [None if i % 7 == 0 else f"2024-05-01T{i % 24:02d}:30" for i in range(ROWS)]
    data = read(tmp_path, get_lines(at=times))
    (column,) = data.columns
    assert (column.cycles, column.indicator, data.shape) == (("day",), True, (4,))
    rows = encode_objects([{"at": None}, {"at": "2024-05-01 06:00"}], data.columns, "x")
    assert rows[0].tolist() == [0, 0, 0, 1]
    assert rows[1, 1:] == pytest.approx([1, 0, 0], abs=1e-6)


def test_parquet_s_dates_are_those_of_csv(tmp_path):
    expected = read(tmp_path, get_lines(day=DAYS))
    for kind in (pa.date32(), pa.timestamp("ns"), pa.timestamp("s", "UTC")):
        days = pa.array(np.array(DAYS, "M8[D]")).cast(kind)
        parquet.write_table(pa.table({"day": days, "label": LABEL}), tmp_path / "a.parquet")
        assert (
            load(get_recipe("parquet:a.parquet", target="label"), tmp_path).digest()
            == expected.digest()
        )


def test_dates_that_could_be_read_in_two_ways_are_refused_unless_the_recipe_says(tmp_path):
    days = [f"0{1 + i % 9}/0{1 + i % 7}/2024" for i in range(ROWS)]
    refused(
        lambda: read(tmp_path, get_lines(day=days)),
        "column day: expected unambiguous dates (set data.date_format",
        "got '08/01/2024'",  # the first that is not the same either way
    )
    first = read(tmp_path, get_lines(day=days), date_format="%d/%m/%Y")
    second = read(tmp_path, get_lines(day=days), date_format="%m/%d/%Y")
    assert first.columns[0].mean != second.columns[0].mean
    assert (first.columns[0].written, second.columns[0].written) == ("%d/%m/%Y", "%m/%d/%Y")
    assert (
        read(tmp_path, get_lines(day=days), columns={"day": "categorical"}).columns[0].kind
        == "categorical"
    )
    bad = [*days[:-1], "soon"]
    says = "column day: expected dates or times, such as 2024-05-01"
    refused(
        lambda: read(tmp_path, get_lines(day=bad), columns={"day": "time"}),
        says,
        "got 'soon' in row 59",
    )


def test_of_dates_that_read_alike_either_way_requests_write_iso_8601_alone(tmp_path):
    days = [f"0{1 + i % 9}/0{1 + i % 9}/2024" for i in range(ROWS)]
    (column,) = read(tmp_path, get_lines(day=days)).columns
    assert (column.kind, column.written) == ("time", None)


def test_a_date_format_may_have_names_and_times_of_day(tmp_path):
    names = [f"{np.datetime64(day).item():%a %d %b %Y %H:%M}" for day in DAYS]
    data = read(tmp_path, get_lines(day=names), date_format="%a %d %b %Y %H:%M")
    (column,) = data.columns
    rows = encode_objects(
        [{"day": "Tue 07 May 2024 13:30"}, {"day": "2024-05-07T13:30"}], data.columns, "x"
    )
    assert column.written == "%a %d %b %Y %H:%M"
    assert rows[0].tolist() == rows[1].tolist()
    names[3] = "soon"
    assert (
        read(tmp_path, get_lines(day=names), date_format="%a %d %b %Y %H:%M").columns[0].kind
        == "categorical"
    )


@pytest.mark.parametrize("form", ["%d/%m", "%H:%M", "%d%d", "%Y-%Q", "%", "soon", ""])
def test_a_date_format_that_says_no_whole_date_is_refused(form):
    refused(
        lambda: validate(
            content_with(data={"source": "csv:a.csv", "target": "label", "date_format": form}), "r"
        ),
        "r: data.date_format: expected a strptime format with year, month and day",
    )


def test_of_many_categories_the_frequent_ones_are_told_apart(tmp_path, caplog):
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
def test_a_first_line_that_tells_the_delimiter_is_no_row(tmp_path, delimiter, end):
    expected = read(tmp_path, get_lines())
    content = f"sep={delimiter}\n" + get_lines(delimiter)
    assert read(tmp_path, content.replace("\n", end)).digest() == expected.digest()
    assert read(tmp_path, "\ufeff" + content, delimiter=delimiter).digest() == expected.digest()


@pytest.mark.parametrize("delimiter", [",", ";"])
def test_delimiters_at_the_ends_of_lines_make_no_columns(tmp_path, delimiter):
    expected = read(tmp_path, get_lines())
    ended = get_lines(delimiter).replace("\n", f"{delimiter}{delimiter}\n")
    assert read(tmp_path, ended).digest() == expected.digest()
    names = ended.replace(f"{delimiter}{delimiter}\n", "\n", 1)
    assert read(tmp_path, names).digest() == expected.digest()
    empty = ended + f"{delimiter * 4}\n"
    assert read(tmp_path, empty).digest() == expected.digest()
    refused(
        lambda: read(tmp_path, ended + f"Rome{delimiter}1{delimiter}no{delimiter}x\n"), "3 cells"
    )


def test_a_table_may_be_gzipped_and_is_none_of_excel_s(tmp_path):
    expected = read(tmp_path, get_lines())
    full = gzip.compress(get_lines().encode())
    recipe = get_recipe("csv:b.csv.gz", target="label")
    (tmp_path / "b.csv.gz").write_bytes(full)
    assert load(recipe, tmp_path).digest() == expected.digest()
    for content in (full[:-20], full[:10] + b"x" * 20):
        (tmp_path / "b.csv.gz").write_bytes(content)
        refused(lambda: load(recipe, tmp_path), "data.source: expected a readable CSV file")
    for source in ("csv:b.xlsx", "parquet:b.XLSX"):
        (tmp_path / source.partition(":")[2]).write_bytes(b"PK\x03\x04")
        says = "a CSV or Parquet file (save the sheet as `CSV UTF-8`), got an Excel workbook"
        refused(lambda source=source: load(get_recipe(source, target="label"), tmp_path), says)


def test_text_in_parquet_that_is_all_numbers_may_be_a_target_or_a_number(tmp_path):
    table = pa.table({"x": ["1.5", "2", None] * 20, "y": [str(i) for i in range(ROWS)]})
    parquet.write_table(table, tmp_path / "a.parquet")
    section = DataSection(source="parquet:a.parquet", target="y", columns={"x": "numeric"})
    actual = inspect_source(section, tmp_path, "regression")
    assert actual.targets.tolist() == [*range(ROWS)]
