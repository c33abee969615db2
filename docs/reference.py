"""Write the tables of fields, problems and settings: `python -m docs.reference`."""

from collections.abc import Iterable
from pathlib import Path

from service.api.explanations import EXPLANATION
from service.api.fields import Field
from service.api.predictions import BY_TASK
from service.api.problems import all_problems
from service.settings import PREFIX, Settings

DOCS = Path(__file__).parent
REFERENCE = DOCS / "api.md"
PROBLEMS = DOCS / "problems.md"
SETTINGS = DOCS / "settings.md"
TABLES = {
    "classification": BY_TASK["classification"],
    "regression": [field for field in BY_TASK["regression"] if field.task is not None],
    "explanation": EXPLANATION,
}


def with_tables(text: str) -> str:
    for name, fields in TABLES.items():
        text = with_table(text, f"fields: {name}", reference_table(fields))
    return text


def with_table(text: str, name: str, table: str) -> str:
    before, mark, after = text.partition(f"<!-- {name} -->\n")
    _, end, after = after.partition("\n<!-- end -->")
    return before + mark + table + end + after


def reference_table(fields: Iterable[Field]) -> str:
    rows = [f"| `{field.name}` | {field.unit} | {field.description} |" for field in fields]
    return "\n".join(["| Field | Unit | Meaning |", "|---|---|---|", *rows])


def problem_table() -> str:
    rows = [f"| `{c}` | {status} | {meaning} | {do} |" for c, status, meaning, do in all_problems()]
    return "\n".join(["| Code | Status | Meaning | Remedy |", "|---|---|---|---|", *rows])


def settings_table() -> str:
    rows = [
        f"| `{PREFIX}{name.upper()}` | {_default(field.default)} | "
        f"{' '.join(str(field.description).split())} |"
        for name, field in Settings.model_fields.items()
    ]
    return "\n".join(["| Variable | Default | Meaning |", "|---|---|---|", *rows])


def _default(value: object) -> str:
    if value in (None, ""):
        return "none" if value is None else "empty"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


if __name__ == "__main__":
    REFERENCE.write_text(with_tables(REFERENCE.read_text()))
    PROBLEMS.write_text(with_table(PROBLEMS.read_text(), "problems", problem_table()))
    SETTINGS.write_text(with_table(SETTINGS.read_text(), "settings", settings_table()))
