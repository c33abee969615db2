"""Check errors of invalid input."""

from collections.abc import Callable

import pytest

from model_store.errors import InvalidInput


def refused(call: Callable[[], object], *says: str) -> None:
    with pytest.raises(InvalidInput) as error:
        call()
    for text in says:
        assert text in str(error.value)
    assert "\n" not in str(error.value)
