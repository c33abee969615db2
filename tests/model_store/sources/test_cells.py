from datetime import UTC, datetime, timedelta, timezone
from unicodedata import normalize

import numpy as np
import pytest

from model_store.sources.cells import match_category, parse_time, phases, seconds_since

DAY = 24 * 60 * 60


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1970-01-01", 0.0),
        ("1970-01-02", DAY),
        ("1969-12-31", -DAY),
        ("1970-01-01T00:01", 60.0),
        ("1970-01-01 00:00:05.25", 5.25),
        ("1970-01-01T00:00:00Z", 0.0),
        ("1970-01-01T02:00+02:00", 0.0),
        ("1970-01-01 02:00:00.5+02", 0.5),  # PostgreSQL
        ("1970-01-01T02:00:01-0130", 3.5 * 3600 + 1),
        ("2000-03-01", 11_017 * DAY),
    ],
)
def test_parse_time_returns_seconds_since_1970_in_utc(text, seconds):
    assert parse_time(None, text) == seconds


@pytest.mark.parametrize(
    "text", ["", "1970", "1970-01", "01.05.2024", "1970-01-01T00", "1970-02-30", "1970-W01-1"]
)
def test_text_that_is_not_an_iso_8601_time_is_refused(text):
    with pytest.raises(ValueError):
        parse_time(None, text)


def test_seconds_since_respects_the_offset_and_defaults_to_utc():
    noon = datetime(1970, 1, 1, 12)
    assert seconds_since(noon) == seconds_since(noon.replace(tzinfo=UTC)) == DAY / 2
    assert seconds_since(noon.replace(tzinfo=timezone(timedelta(hours=3)))) == DAY / 2 - 3 * 3600


@pytest.mark.parametrize(("cycle", "days"), [("day", 1), ("week", 7), ("year", 365.2425)])
def test_phases_complete_one_turn_per_cycle(cycle, days):
    quarters = np.array([0, 1, 2, 3, 4, -1]) * days * DAY / 4
    expected = [[0, 1], [1, 0], [0, -1], [-1, 0], [0, 1], [-1, 0]]
    assert phases(quarters, cycle) == pytest.approx(np.array(expected), abs=1e-9)


@pytest.mark.parametrize("category_form", ["NFC", "NFD"])
@pytest.mark.parametrize("text_form", ["NFC", "NFD"])
def test_categories_match_in_every_unicode_form(category_form, text_form):
    category = normalize(category_form, "Zürich")
    assert match_category(normalize(text_form, " Zürich"), {category, "Bern"}) == category


@pytest.mark.parametrize(
    ("text", "categories", "expected"),
    [
        ("1", {"true", "false"}, "true"),
        ("0.0", {"true", "false"}, "false"),
        ("TRUE", {"0", "1"}, "1"),
        ("1", {"true"}, "true"),
        ("2", {"true", "false"}, "2"),
        ("1", {"true", "false", "maybe"}, "1"),
        ("true", {"0", "1", "2"}, "true"),
    ],
)
def test_bits_match_booleans_if_all_categories_are_booleans(text, categories, expected):
    assert match_category(text, categories) == expected


def test_categories_that_differ_only_in_unicode_form_stay_distinct():
    categories = {normalize(form, "Zürich") for form in ("NFC", "NFD")}
    assert len(categories) == 2
    assert [match_category(category, categories) for category in categories] == [*categories]
