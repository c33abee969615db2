"""What a preflight predicts, in this process; how processes are limited and ended is in
tests/resilience."""

import pytest

from model_store.errors import BrokenArtifact
from model_store.inference import preflight, runtime
from model_store.inference.runtime import Runtime
from tests.support import tiny


def test_a_preflight_makes_no_more_draws_at_once_than_the_service_does(tmp_path, monkeypatch):
    model, asked, draw = tiny.loaded(tmp_path, paired=False), [], Runtime.draw

    def recorded(self, seed, first_draw, num_draws):
        asked.append(range(first_draw, first_draw + num_draws))
        return draw(self, seed, first_draw, num_draws)

    monkeypatch.setattr(runtime, "HELD_BYTES", tiny.DRAWS * model.runtime.draw_bytes - 1)
    monkeypatch.setattr(runtime, "CHUNK_BYTES", 3 * model.runtime.draw_bytes)
    monkeypatch.setattr(Runtime, "draw", recorded)
    preflight.predict(model)
    assert max(len(some) for some in asked) == 3
    assert {k for some in asked for k in some} == set(range(tiny.DRAWS))


def test_draws_that_cannot_be_made_are_the_version_s_fault(tmp_path, monkeypatch):
    model = tiny.loaded(tmp_path)

    def none_left(*_):
        raise MemoryError

    monkeypatch.setattr(Runtime, "draw", none_left)
    with pytest.raises(BrokenArtifact, match="it does not predict a row: MemoryError") as broken:
        preflight.predict(model)
    assert preflight.is_of_memory(broken.value)
