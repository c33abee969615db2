import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_store.artifacts.manifest import CategoricalColumn, NumericColumn, TimeColumn
from model_store.errors import InvalidInput
from model_store.inference.explanation import replace_each_column
from model_store.sources.columns import (
    category_text,
    check_complete,
    encode,
    encode_cells,
    encode_objects,
    fill_missing,
    unknown_categories,
    unknown_cells,
    usual_row,
)

COLUMNS = (
    NumericColumn(name="age", mean=40.0, std=10.0, indicator=False),
    NumericColumn(name="income", mean=-1.0, std=0.5, indicator=True),
    CategoricalColumn(name="city", categories=("Oslo", "Rome")),
    CategoricalColumn(name="vip", categories=("false", "true")),
)
VALID = {"age": 30, "income": 0.0, "city": "Rome", "vip": True}
USUAL = {"age": 40, "income": -1, "city": "", "vip": ""}  # means and unknown categories
ENCODED = [-1.0, 2.0, 0.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0]


def test_row_is_standardised_and_one_hot_encoded():
    assert encode_objects([VALID], COLUMNS, "inputs").tolist() == [ENCODED]


def test_key_order_does_not_matter():
    assert encode_objects([dict(reversed(VALID.items()))], COLUMNS, "inputs").tolist() == [ENCODED]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"age": None}, {0: 0.0}),
        ({"income": None}, {1: 0.0, 2: 1.0}),
        ({"city": None}, {4: 0.0, 5: 1.0}),
        ({"city": "Paris"}, {4: 0.0, 5: 1.0}),
        ({"city": "rome"}, {4: 0.0, 5: 1.0}),
        ({"city": ""}, {4: 0.0, 5: 1.0}),
        ({"city": 7}, {4: 0.0, 5: 1.0}),
        ({"vip": False}, {6: 1.0, 7: 0.0}),
        ({"vip": "true"}, {}),
        ({"vip": None}, {7: 0.0, 8: 1.0}),
    ],
)
def test_missing_values_and_unknown_categories_are_encoded(changes, expected):
    encoded = list(ENCODED)
    for i, value in expected.items():
        encoded[i] = value
    assert encode_objects([VALID | changes], COLUMNS, "inputs").tolist() == [encoded]


def test_categories_are_matched_as_in_training():
    columns = [
        CategoricalColumn(name="sold", categories=("false", "true")),
        CategoricalColumn(name="city", categories=("Oslo", " Bergen ")),
    ]
    rows = [
        {"sold": sold, "city": city}
        for sold, city in [("TRUE", " Oslo"), (True, "Oslo"), (" True ", "Oslo "), ("yes", "oslo")]
    ]
    encoded = encode_objects(rows, columns, "inputs")
    assert (encoded[:3] == encoded[1]).all()
    assert unknown_categories(encoded, columns) == {"sold": 1, "city": 1}
    assert unknown_cells(encoded, columns).tolist() == [[False, False]] * 3 + [[True, True]]
    assert encode_objects([{"sold": True, "city": " Bergen "}], columns, "inputs")[0, 4] == 1.0


@pytest.mark.parametrize("name", VALID)
def test_value_never_missing_in_training_is_required_or_filled(name):
    complete, partial, unknown = (
        tuple(column.model_copy(update={"missing": missing}) for column in COLUMNS)
        for missing in (False, True, None)
    )
    rows = [VALID, VALID | {name: None}]
    x = encode_objects(rows, complete, "inputs")
    with pytest.raises(
        InvalidInput, match=rf"^inputs\.6\.{name}: expected a value, because all training rows"
    ):
        check_complete(x, complete, "inputs", 5)
    mask = fill_missing(x, complete)
    usual = encode_objects([VALID | {name: USUAL[name]}], complete, "inputs")
    assert x.tolist() == [ENCODED, *usual.tolist()]
    assert [c.name for c, is_missing in zip(complete, mask[1], strict=True) if is_missing] == [name]
    assert not mask[0].any()
    assert fill_missing(x, complete) is None
    np.testing.assert_array_equal(
        encode_objects(rows, partial, "inputs"), encode_objects(rows, unknown, "inputs")
    )
    assert encode_objects([VALID], complete, "inputs").tolist() == [ENCODED]


def test_missing_number_in_array_gets_the_usual_value():
    column = NumericColumn(
        name="age", mean=40.0, std=10.0, indicator=False, missing=False, usual=45.0
    )
    x = encode_cells({"age": np.array([30.0, np.nan])}, (column,), "pool")
    assert fill_missing(x, (column,)).tolist() == [[False], [True]]
    assert x.tolist() == [[-1.0], [0.5]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"age": "30"}, "inputs.1.age: expected a number, or null, got a string"),
        ({"age": True}, "inputs.1.age: expected a number, or null, got a boolean"),
        ({"age": [30]}, "inputs.1.age: expected a number, or null, got an array"),
        ({"age": 1e300}, "inputs.1.age: expected a number closer"),
        ({"income": -1.7e308}, "inputs.1.income: expected a number closer"),
        ({"city": ["Rome"]}, "inputs.1.city: expected a string, number"),
        ({"vip": {}}, "inputs.1.vip: expected a string, number or boolean, or null, got an object"),
        ({"size": 3}, "inputs.1.size: expected only the columns"),
    ],
)
def test_invalid_value_error_names_row_and_column(changes, message):
    with pytest.raises(InvalidInput) as raised:
        encode_objects([VALID, VALID | changes], COLUMNS, "inputs")
    assert str(raised.value).startswith(message)


def test_absent_column_is_refused_instead_of_treated_as_missing():
    row = {name: value for name, value in VALID.items() if name != "city"}
    with pytest.raises(
        InvalidInput, match=r"^inputs\.0\.city: expected a value, or null if it is missing"
    ):
        encode_objects([row], COLUMNS, "inputs")
    with pytest.raises(InvalidInput, match=r"^inputs\.1: expected an object keyed by column"):
        encode_objects([VALID, [0.0] * 9], COLUMNS, "inputs")


DAY = 24 * 60 * 60.0
TIMES = (
    TimeColumn(name="seen", mean=DAY, std=2 * DAY, indicator=True, cycles=("week", "day")),
    NumericColumn(name="age", mean=0.0, std=1.0, indicator=False),
)


def test_time_is_standardised_and_followed_by_cycle_phases():
    encoded = encode_objects([{"seen": "1970-01-08T06:00", "age": 1}], TIMES, "inputs")
    quarter = 2 * np.pi * 0.25 / 7
    assert encoded[0] == pytest.approx(
        [6.25 / 2, np.sin(quarter), np.cos(quarter), 1.0, 0.0, 0.0, 1.0], abs=1e-6
    )


def test_missing_time_sets_only_its_indicator():
    assert encode_objects([{"seen": None, "age": 1}], TIMES, "inputs").tolist() == [
        [0, 0, 0, 0, 0, 1, 1]
    ]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"seen": 5, "age": 1}, "inputs.3.seen: expected a date or time in ISO 8601, such"),
        ({"seen": [], "age": 1}, "inputs.3.seen: expected a date or time in ISO 8601, .*"),
        ({"seen": "soon", "age": 1}, "inputs.3.seen: expected a date or time in ISO 8601, .*"),
        ({"seen": None, "age": 1e39}, "inputs.3.age: expected a number closer to the training"),
    ],
)
def test_invalid_cell_in_table_with_times_is_named(row, message):
    with pytest.raises(InvalidInput) as raised:
        encode_objects([row], TIMES, "inputs", first_row=3)
    assert re.match(message, str(raised.value))


DAY_FIRST = (TimeColumn(name="day", mean=0.0, std=DAY, indicator=False, written="%d/%m/%Y"),)


@pytest.mark.parametrize(
    ("cell", "days"),
    [
        ("04/03/1970", 62.0),
        ("1970-03-04", 62.0),
        ("4/3/1970", 62.0),
        (" 04/03/1970 06:00", 62.25),
        ("04/03/1970T06:00:00", 62.25),
        ("1970-03-04T06:00+06:00", 62.0),
    ],
)
def test_time_can_use_the_format_of_the_training_data(cell, days):
    assert encode_objects([{"day": cell}], DAY_FIRST, "inputs").tolist() == [[days]]


@pytest.mark.parametrize(
    "cell", ["31/31/1970", "03.04.1970", "", "04/03/1970 25:00", "04/03/1970" + " " * 100, 5]
)
def test_time_in_another_format_is_refused_with_an_example(cell):
    message = r"inputs.0.day: expected a date or time in ISO 8601, such as .*, or as the training data had it, such as "
    with pytest.raises(InvalidInput, match=message + r"'31/05/2024', or null, got "):
        encode_objects([{"day": cell}], DAY_FIRST, "inputs")


def test_error_names_first_unknown_or_absent_column_and_ten_known_columns():
    columns = tuple(
        NumericColumn(name=f"c{i}", mean=0.0, std=1.0, indicator=False) for i in range(12)
    )
    row = {f"c{i}": 0.0 for i in range(12)}
    with pytest.raises(InvalidInput) as raised:
        encode_objects([row | {"y": 1, "x": 1}], columns, "inputs")
    known_names = "c0, c1, c2, c3, c4, c5, c6, c7, c8, c9, ..."
    assert (
        str(raised.value)
        == f"inputs.0.x: expected only the columns {known_names}, got an unknown one"
    )
    del row["c5"], row["c3"]
    with pytest.raises(InvalidInput, match=r"^inputs\.0\.c3: expected a value"):
        encode_objects([row], columns, "inputs")


def test_error_truncates_long_column_names():
    names = [letter * 300 for letter in "ab"]
    columns = tuple(NumericColumn(name=name, mean=0.0, std=1.0, indicator=False) for name in names)
    with pytest.raises(InvalidInput) as raised:
        encode_objects([dict.fromkeys([*names, "z" * 100], 0.0)], columns, "inputs")
    known_names = f"{names[0]}, {names[1]}"[:500]
    assert (
        str(raised.value)
        == f"inputs.0.{'z' * 80}: expected only the columns {known_names}, got an unknown one"
    )


cells = st.none() | st.floats(-1e6, 1e6)
rows = st.fixed_dictionaries(
    {
        "age": cells,
        "income": cells,
        "city": st.none() | st.sampled_from(["Oslo", "Rome", "Paris"]),
        "vip": st.none() | st.booleans(),
    }
)


@given(st.lists(rows, min_size=1, max_size=20))
def test_row_encoding_does_not_depend_on_other_rows(objects):
    batch = encode_objects(objects, COLUMNS, "inputs")
    single = np.concatenate([encode_objects([row], COLUMNS, "inputs") for row in objects])
    assert batch.tobytes() == single.tobytes()


@given(rows)
def test_table_arrays_and_request_objects_are_encoded_identically(row):
    values = {
        "age": np.array([np.nan if row["age"] is None else row["age"]]),
        "income": np.array([np.nan if row["income"] is None else row["income"]]),
        "city": [row["city"]],
        "vip": [None if row["vip"] is None else str(row["vip"]).lower()],
    }
    assert np.array_equal(encode(COLUMNS, values), encode_objects([row], COLUMNS, "inputs"))


@pytest.mark.parametrize(
    ("value", "text"),
    [("a", "a"), (True, "true"), (False, "false"), (3, "3"), (3.0, "3"), (2.5, "2.5"), (-0.0, "0")],
)
def test_category_text_is_canonical(value, text):
    assert category_text(value) == text


def test_usual_row_is_encoded_like_any_other():
    usual = {"age": 30.0, "income": 0.0, "city": "Rome", "vip": "true"}
    columns = [column.model_copy(update={"usual": usual[column.name]}) for column in COLUMNS]
    assert usual_row(columns).tolist() == ENCODED


def test_replace_each_column_sets_one_column_to_its_usual_value():
    usual = {"age": 0.0, "income": 0.0, "city": "Oslo", "vip": "false"}
    columns = [column.model_copy(update={"usual": usual[column.name]}) for column in COLUMNS]
    x = encode_objects([VALID, VALID | {"age": 50, "city": None}], COLUMNS, "inputs")
    expected = []
    for row in ({**VALID}, VALID | {"age": 50, "city": None}):
        changes = [{}, *({name: value} for name, value in usual.items())]
        expected.append(encode_objects([row | change for change in changes], COLUMNS, "inputs"))
    assert np.array_equal(replace_each_column(columns, x), np.concatenate(expected))
