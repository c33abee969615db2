import numpy as np
import pytest

from model_store.artifacts.manifest import ImageSpec, InputSpec
from model_store.sources import rows as rows_module
from model_store.sources.rows import RowReader
from service.request_context import RequestContext
from service.server.budget import ByteBudget, Reservation
from tests.support.images import png_bytes

SPEC = InputSpec(shape=(2, 3), minimum=0.0, maximum=255.0, image=ImageSpec(mode="L"))
PIXELS = np.random.default_rng(0).integers(0, 256, (23, 2, 3), dtype=np.uint8)


@pytest.mark.parametrize("kind", ["files", "nested", "flat", "uint8", "float32"])
@pytest.mark.parametrize("chunk_rows", [1, 2, 5, 22, 23, 24])
def test_all_rows_are_read_in_order_for_any_chunk_size(monkeypatch, kind, chunk_rows):
    monkeypatch.setattr(rows_module, "NUMBERS_AT_ONCE", 6 * chunk_rows)
    rows = {
        "files": [png_bytes(pixels) for pixels in PIXELS],
        "nested": PIXELS.tolist(),
        "flat": PIXELS.reshape(23, 6).tolist(),
        "uint8": PIXELS,
        "float32": PIXELS.astype(np.float32),
    }[kind]
    pauses: list[int] = []
    context = RequestContext(Reservation(ByteBudget(1 << 30)), on_pause=lambda: pauses.append(1))
    x = RowReader(SPEC, "inputs", context).read_all(rows)
    assert x.tolist() == PIXELS.reshape(23, 6).tolist()
    assert len(pauses) >= 22 // chunk_rows
