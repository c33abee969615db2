import json

import pytest

from tests.support.environment import ROOT

FOLDER = ROOT / "examples" / "notebooks"
NAMES = ("network", "pool", "table")


def test_folder_contains_expected_notebooks():
    assert sorted(path.stem for path in FOLDER.glob("*.ipynb")) == [*NAMES]


@pytest.mark.parametrize("name", NAMES)
def test_notebook_is_small_and_contains_outputs_of_one_run(name):
    path = FOLDER / f"{name}.ipynb"
    assert path.stat().st_size < 150_000
    cells = json.loads(path.read_text())["cells"]
    assert len(cells) < 15
    assert cells[0]["source"][0].startswith("# ")
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == [*range(1, len(code) + 1)]
    outputs = [output for cell in code for output in cell["outputs"]]
    assert {output["output_type"] for output in outputs} <= {
        "display_data",
        "execute_result",
        "stream",
    }
    assert any("image/png" in output.get("data", {}) for output in outputs)
