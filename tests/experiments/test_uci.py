import numpy as np
import pytest

from experiments.uci import load_uci
from tests.support.recipes import get_recipe


def test_uci_source_selects_named_split(tmp_path, monkeypatch):
    monkeypatch.setenv("DUBITO_DATA", str(tmp_path))
    random = np.random.default_rng(0)
    content = np.column_stack([np.arange(30.0), *random.normal(size=(2, 30))])
    files = {
        "data": content,
        "index_features": [0, 2],
        "index_target": [1],
        "index_train_4": np.arange(10, 30),
        "index_test_4": np.arange(10),
    }
    (tmp_path / "sets").mkdir()
    for name, array in files.items():
        np.savetxt(tmp_path / "sets" / f"{name}.txt", array)
    data = load_uci(get_recipe("uci:sets/4", "regression"))
    assert [column.name for column in data.columns] == ["x0", "x1"]
    raw = data.train.x * [c.std for c in data.columns] + [c.mean for c in data.columns]
    assert raw == pytest.approx(content[10:, [0, 2]], abs=1e-5)
    assert np.array_equal(data.train.y, content[10:, 1].astype(np.float32))
    assert np.array_equal(data.test.y, content[:10, 1].astype(np.float32))
