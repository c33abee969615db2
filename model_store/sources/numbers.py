"""Numbers as people write them: $1,200.50, 12 %, 1.234,5. One reading for training and for the
service.

A sign of money or percent stands before or after the digits, the same in all of a column's cells,
and counts for nothing: 12 % is 12, and not .12.
"""

import re
from functools import lru_cache

from model_store.artifacts.manifest import NumberWriting

SIGNS = "$€£¥%"
SPACES = "\u00a0\u202f"  # that no line is broken at: as good as a space
COMMA_NUMBER = re.compile(r"[+-]?\d*,\d+(?:[eE][+-]?\d+)?", re.ASCII)
LONGEST = 100  # characters of a text that is looked at


def example_of(writing: NumberWriting) -> str:
    """Return a number so written."""
    digits = f"1{writing.thousands or ''}200{writing.decimal}5"
    return f"{digits} %" if writing.sign == "%" else f"{writing.sign}{digits}"


def number_of(text: str, writing: NumberWriting) -> float:
    """Return the number of a text; the sign may be left out.

    Raises:
        ValueError: if it is not so written.
    """
    match = (
        None
        if len(text) > LONGEST
        else _pattern(writing).fullmatch(text.translate(_TO_SPACE).strip())
    )
    if match is None:
        raise ValueError(text)
    whole = match["whole"].replace(writing.thousands, "") if writing.thousands else match["whole"]
    return float(f"{match['minus'] or ''}{whole}.{match['part'] or '0'}")


def sign_of(text: str) -> str | None:
    """Return the sign in a text, "" where there is none, None where there are several."""
    found = [character for character in text if character in SIGNS]
    return None if len(found) > 1 else "".join(found)


_TO_SPACE = str.maketrans(dict.fromkeys(SPACES, " "))


@lru_cache(maxsize=256)
def _pattern(writing: NumberWriting) -> re.Pattern[str]:
    grouped = rf"\d{{1,3}}(?:{re.escape(writing.thousands)}\d{{3}})+|" if writing.thousands else ""
    sign = re.escape(writing.sign)
    before = "" if writing.sign in ("", "%") else f"(?:{sign} ?)?"
    after = f"(?: ?{sign})?" if writing.sign else ""
    number = rf"(?P<whole>{grouped}\d+)(?:{re.escape(writing.decimal)}(?P<part>\d+))?"
    return re.compile(rf"(?P<minus>[+-])?{before}{number}{after}", re.ASCII)
