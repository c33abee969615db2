"""How a column's numbers are written, where that can be told without doubt."""

from collections.abc import Collection
from typing import get_args

from model_store.artifacts.manifest import Decimal, NumberWriting, Thousands
from model_store.sources.cells import number_of, sign_of


def writing_of(
    texts: Collection[str], decimal: str | None, thousands: str | None
) -> NumberWriting | None:
    """Return how the texts of a column are written as numbers, None where they are not, or it can
    be doubted.

    All must have the same sign, or none. Every way of writing that reads all of them must read the
    same numbers: 1,234 alone may be 1234 or 1.234. A `decimal` or `thousands` that is known leaves
    fewer ways.
    """
    signs = {sign_of(text) for text in texts}
    if len(signs) != 1 or (sign := signs.pop()) is None:
        return None
    found: dict[tuple[float, ...], NumberWriting] = {}
    for point in get_args(Decimal):
        for mark in (None, *get_args(Thousands)):
            is_told = decimal in (None, point) and (thousands is None or thousands == mark)
            if mark == point or not is_told:
                continue
            writing = NumberWriting(sign=sign, decimal=point, thousands=mark)  # type: ignore[arg-type]
            try:
                numbers = tuple(number_of(text, writing) for text in texts)
            except ValueError:
                continue
            found.setdefault(numbers, writing)
    return next(iter(found.values())) if len(found) == 1 else None
