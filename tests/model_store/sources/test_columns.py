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
GOOD = {"age": 30, "income": 0.0, "city": "Rome", "vip": True}
USUAL = {"age": 40, "income": -1, "city": "", "vip": ""}  # means, and unknown categories
ENCODED = [-1.0, 2.0, 0.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0]


def test_a_row_is_standardised_and_one_hot():
    assert encode_objects([GOOD], COLUMNS, "inputs").tolist() == [ENCODED]


def test_the_order_of_keys_does_not_matter():
    assert encode_objects([dict(reversed(GOOD.items()))], COLUMNS, "inputs").tolist() == [ENCODED]


@pytest.mark.parametrize(
    ("changed", "expected"),
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
def test_missing_values_and_unseen_categories_have_their_numbers(changed, expected):
    encoded = list(ENCODED)
    for i, value in expected.items():
        encoded[i] = value
    assert encode_objects([GOOD | changed], COLUMNS, "inputs").tolist() == [encoded]


def test_a_category_is_told_apart_as_training_reads_it():
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


@pytest.mark.parametrize("name", GOOD)
def test_a_value_that_no_training_row_lacks_is_replaced_or_refused(name):
    never, some, older = (
        tuple(column.model_copy(update={"missing": message}) for column in COLUMNS)
        for message in (False, True, None)
    )
    rows = [GOOD, GOOD | {name: None}]
    x = encode_objects(rows, never, "inputs")
    with pytest.raises(
        InvalidInput, match=rf"^inputs\.6\.{name}: expected a value, because all training rows"
    ):
        check_complete(x, never, "inputs", 5)
    missing = fill_missing(x, never)
    usual = encode_objects([GOOD | {name: USUAL[name]}], never, "inputs")
    assert x.tolist() == [ENCODED, *usual.tolist()]
    assert [c.name for c, is_missing in zip(never, missing[1], strict=True) if is_missing] == [name]
    assert not missing[0].any()
    assert fill_missing(x, never) is None
    np.testing.assert_array_equal(
        encode_objects(rows, some, "inputs"), encode_objects(rows, older, "inputs")
    )
    assert encode_objects([GOOD], never, "inputs").tolist() == [ENCODED]


def test_a_missing_number_in_an_array_gets_the_usual_value():
    column = NumericColumn(
        name="age", mean=40.0, std=10.0, indicator=False, missing=False, usual=45.0
    )
    x = encode_cells({"age": np.array([30.0, np.nan])}, (column,), "pool")
    assert fill_missing(x, (column,)).tolist() == [[False], [True]]
    assert x.tolist() == [[-1.0], [0.5]]


@pytest.mark.parametrize(
    ("changed", "says"),
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
def test_a_wrong_value_is_refused_by_its_place(changed, says):
    with pytest.raises(InvalidInput) as refused:
        encode_objects([GOOD, GOOD | changed], COLUMNS, "inputs")
    assert str(refused.value).startswith(says)


def test_an_absent_column_is_refused_and_is_no_missing_value():
    absent = {name: value for name, value in GOOD.items() if name != "city"}
    with pytest.raises(
        InvalidInput, match=r"^inputs\.0\.city: expected a value, or null if it is missing"
    ):
        encode_objects([absent], COLUMNS, "inputs")
    with pytest.raises(InvalidInput, match=r"^inputs\.1: expected an object keyed by column"):
        encode_objects([GOOD, [0.0] * 9], COLUMNS, "inputs")


DAY = 24 * 60 * 60.0
TIMES = (
    TimeColumn(name="seen", mean=DAY, std=2 * DAY, indicator=True, cycles=("week", "day")),
    NumericColumn(name="age", mean=0.0, std=1.0, indicator=False),
)


def test_a_time_is_standardised_with_where_it_is_in_each_cycle_beside_it():
    encoded = encode_objects([{"seen": "1970-01-08T06:00", "age": 1}], TIMES, "inputs")
    quarter = 2 * np.pi * 0.25 / 7
    assert encoded[0] == pytest.approx(
        [6.25 / 2, np.sin(quarter), np.cos(quarter), 1.0, 0.0, 0.0, 1.0], abs=1e-6
    )


def test_a_missing_time_is_0_everywhere_but_in_its_indicator():
    assert encode_objects([{"seen": None, "age": 1}], TIMES, "inputs").tolist() == [
        [0, 0, 0, 0, 0, 1, 1]
    ]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"seen": 5, "age": 1}, "inputs.3.seen: expected a date or time in ISO 8601, such"),
        ({"seen": [], "age": 1}, "inputs.3.seen: expected a date or time in ISO 8601, .*"),
        ({"seen": "soon", "age": 1}, "inputs.3.seen: expected a date or time in ISO 8601, .*"),
        ({"seen": None, "age": 1e39}, "inputs.3.age: expected a number closer to the training"),
    ],
)
def test_a_wrong_cell_beside_or_among_times_is_refused_by_its_place(row, says):
    with pytest.raises(InvalidInput) as refused:
        encode_objects([row], TIMES, "inputs", first_row=3)
    assert re.match(says, str(refused.value))


WRITTEN = (TimeColumn(name="day", mean=0.0, std=DAY, indicator=False, written="%d/%m/%Y"),)


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
def test_a_time_may_be_written_as_the_training_data_had_it(cell, days):
    assert encode_objects([{"day": cell}], WRITTEN, "inputs").tolist() == [[days]]


@pytest.mark.parametrize(
    "cell", ["31/31/1970", "03.04.1970", "", "04/03/1970 25:00", "04/03/1970" + " " * 100, 5]
)
def test_a_time_that_is_written_otherwise_is_refused_with_an_example(cell):
    says = r"inputs.0.day: expected a date or time in ISO 8601, such as .*, or as the training data had it, such as "
    with pytest.raises(InvalidInput, match=says + r"'31/05/2024', or null, got "):
        encode_objects([{"day": cell}], WRITTEN, "inputs")


def test_of_many_unknown_or_absent_columns_the_first_is_named_with_at_most_ten_that_are_known():
    large = tuple(
        NumericColumn(name=f"c{i}", mean=0.0, std=1.0, indicator=False) for i in range(12)
    )
    row = {f"c{i}": 0.0 for i in range(12)}
    with pytest.raises(InvalidInput) as refused:
        encode_objects([row | {"y": 1, "x": 1}], large, "inputs")
    reference = "c0, c1, c2, c3, c4, c5, c6, c7, c8, c9, ..."
    assert (
        str(refused.value)
        == f"inputs.0.x: expected only the columns {reference}, got an unknown one"
    )
    del row["c5"], row["c3"]
    with pytest.raises(InvalidInput, match=r"^inputs\.0\.c3: expected a value"):
        encode_objects([row], large, "inputs")


def test_long_names_are_cut_where_they_are_refused():
    names = [letter * 300 for letter in "ab"]
    long = tuple(NumericColumn(name=name, mean=0.0, std=1.0, indicator=False) for name in names)
    with pytest.raises(InvalidInput) as refused:
        encode_objects([dict.fromkeys([*names, "z" * 100], 0.0)], long, "inputs")
    reference = f"{names[0]}, {names[1]}"[:500]
    assert (
        str(refused.value)
        == f"inputs.0.{'z' * 80}: expected only the columns {reference}, got an unknown one"
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
def test_a_row_is_encoded_the_same_whatever_stands_beside_it(objects):
    together = encode_objects(objects, COLUMNS, "inputs")
    alone = np.concatenate([encode_objects([row], COLUMNS, "inputs") for row in objects])
    assert together.tobytes() == alone.tobytes()


@given(rows)
def test_arrays_of_a_table_and_objects_of_a_request_are_encoded_alike(row):
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
def test_categories_have_one_name_each(value, text):
    assert category_text(value) == text


def test_the_usual_row_is_encoded_as_others():
    usual = {"age": 30.0, "income": 0.0, "city": "Rome", "vip": "true"}
    reference = [column.model_copy(update={"usual": usual[column.name]}) for column in COLUMNS]
    assert usual_row(reference).tolist() == ENCODED


def test_each_column_in_turn_is_as_usual():
    usual = {"age": 0.0, "income": 0.0, "city": "Oslo", "vip": "false"}
    reference = [column.model_copy(update={"usual": usual[column.name]}) for column in COLUMNS]
    x = encode_objects([GOOD, GOOD | {"age": 50, "city": None}], COLUMNS, "inputs")
    expected = []
    for row in ({**GOOD}, GOOD | {"age": 50, "city": None}):
        changes = [{}, *({name: value} for name, value in usual.items())]
        expected.append(encode_objects([row | change for change in changes], COLUMNS, "inputs"))
    assert np.array_equal(replace_each_column(reference, x), np.concatenate(expected))
