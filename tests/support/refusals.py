"""Check errors of invalid input."""

from collections.abc import Callable

import pytest

from model_store.errors import InvalidInput


def assert_invalid(call: Callable[[], object], *fragments: str) -> None:
    with pytest.raises(InvalidInput) as error:
        call()
    for text in fragments:
        assert text in str(error.value)
    assert "\n" not in str(error.value)
