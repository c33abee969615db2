import json

import numpy as np
import pytest

from model_store.artifacts.manifest import NumberStyle
from model_store.sources.cells import find_sign, number_example, parse_number
from model_store.sources.columns import encode_objects
from tests.support.recipes import get_recipe
from tests.support.refusals import assert_invalid
from training.data import load
from training.data.cells import infer_number_style
from training.data.findings import inspect_source
from training.sections import DataSection

DOLLARS = NumberStyle(sign="$", thousands=",")


@pytest.mark.parametrize(
    ("text", "style", "number"),
    [
        ("$1,200.50", DOLLARS, 1200.5),
        ("-$1,200", DOLLARS, -1200.0),
        ("1200.5", DOLLARS, 1200.5),
        ("1,234,567 $", DOLLARS, 1234567.0),
        ("12 %", NumberStyle(sign="%"), 12.0),
        ("7.5%", NumberStyle(sign="%"), 7.5),
        ("1.234,50 €", NumberStyle(sign="€", decimal=",", thousands="."), 1234.5),
        ("1 234 567", NumberStyle(thousands=" "), 1234567.0),
        ("1\u00a0234,5", NumberStyle(decimal=",", thousands=" "), 1234.5),
        ("1\u2009234,5", NumberStyle(decimal=",", thousands=" "), 1234.5),
        ("1'234.5", NumberStyle(thousands="'"), 1234.5),
    ],
)
def test_numbers_are_parsed_in_their_style(text, style, number):
    assert parse_number(text, style) == number
    assert parse_number(number_example(style), style) == 1200.5


@pytest.mark.parametrize(
    "text", ["", "$", "1,23", "1,23,45", "1,2345", "$ $1", "abc", "1.2.3", "١٢", "9" * 101]
)
def test_text_that_does_not_match_the_style_is_rejected(text):
    with pytest.raises(ValueError):
        parse_number(text, DOLLARS)


@pytest.mark.parametrize(
    ("texts", "separators", "expected"),
    [
        (["$5", "$1,234.50"], (None, None), DOLLARS),
        (["12 %", "7.5 %"], (None, None), NumberStyle(sign="%")),
        (["12 %", "7 %"], (None, None), NumberStyle(sign="%")),
        (["1,234,567", "12"], (None, None), NumberStyle(thousands=",")),
        (["$1,234", "$5,678"], (None, None), None),  # 1234, or 1.234
        (["$1,234", "$5,678"], (".", None), DOLLARS),
        (["$1,234", "$5,678"], (None, ","), DOLLARS),
        (["1.234 %", "2.500 %"], (None, None), None),
        (["1.234 %", "2.500 %"], (".", None), NumberStyle(sign="%")),
        (["1.234,5 €", "2 €"], (None, None), NumberStyle(sign="€", decimal=",", thousands=".")),
        (["$5", "€5"], (None, None), None),
        (["$5", "5"], (None, None), NumberStyle(sign="$")),
        (["$5", "free"], (None, None), None),
        (["$5%"], (None, None), None),
    ],
)
def test_number_style_is_inferred_if_unambiguous(texts, separators, expected):
    assert infer_number_style(texts, *separators) == expected


def test_sign_can_occur_only_once():
    assert [find_sign(text) for text in ("12", "12 %", "$1%")] == ["", "%", None]


PRICES = [f"${1000 + 7 * i:,}.50" for i in range(40)]


def write_table(folder, **columns):
    cells = {
        "price": PRICES,
        "share": [f"{i} %" for i in range(40)],
        "label": ["a", "b"] * 20,
        **columns,
    }
    lines = [
        ",".join(cells),
        *(",".join(f'"{c}"' for c in row) for row in zip(*cells.values(), strict=True)),
    ]
    (folder / "a.csv").write_text("\n".join(lines) + "\n")


def test_tables_and_requests_can_use_number_styles(tmp_path):
    write_table(tmp_path)
    data = load(get_recipe("csv:a.csv", target="label"), tmp_path)
    price, share = data.columns
    assert (price.kind, price.written) == ("numeric", DOLLARS)
    assert (share.kind, share.written) == ("numeric", NumberStyle(sign="%"))
    rows = [
        {"price": text, "share": cell}
        for text, cell in (("$1,203.50", "12 %"), (1203.5, 12), ("1203.50", "12%"))
    ]
    x = encode_objects(json.loads(json.dumps(rows)), data.columns, "inputs")
    assert (x == x[0]).all()
    assert x[0, 0] == np.float32((1203.5 - price.mean) / price.std)
    assert_invalid(
        lambda: encode_objects([{"price": "1.203,50 EUR", "share": 1}], data.columns, "inputs"),
        "inputs.0.price: expected a number, or text as the training data had it, such as "
        "'$1,200.5', or null, got a string",
    )
    assert "EUR" not in str(price.written)


def test_targets_can_have_number_styles_and_ambiguous_text_causes_a_note(tmp_path):
    write_table(tmp_path, odd=[f"{1 + i},{100 + i} %" for i in range(40)])
    data = load(
        get_recipe("csv:a.csv", "regression", target="price", columns={"odd": "ignored"}), tmp_path
    )
    assert sorted(np.concatenate([data.train.y, data.test.y]).tolist())[0] == 1000.5
    findings = inspect_source(DataSection(source="csv:a.csv", target="label"), tmp_path)
    notes = {column.name: (column.kind, column.notes) for column in findings.columns}
    assert notes["price"][0] == "numeric"
    assert any("format is ambiguous" in note for note in notes["odd"][1])
    output = inspect_source(DataSection(source="csv:a.csv", target="label", decimal=","), tmp_path)
    assert next(column for column in output.columns if column.name == "odd").kind == "numeric"
    categorical_data = load(
        get_recipe("csv:a.csv", target="label", columns={"price": "categorical"}), tmp_path
    )
    assert categorical_data.columns[0].kind == "categorical"
