"""`python -m service.api.reference`: write the tables of fields into docs/api.md."""

from pathlib import Path

from service.api.explanations import EXPLANATION
from service.api.fields import of_task, reference_table
from service.api.predictions import FIELDS

REFERENCE = Path(__file__).parents[2] / "docs" / "api.md"
TABLES = {
    "classification": of_task(FIELDS, "classification"),
    "regression": [field for field in FIELDS if field.task == "regression"],
    "explanation": EXPLANATION,
}


def with_tables(text: str) -> str:
    for name, fields in TABLES.items():
        before, mark, after = text.partition(f"<!-- fields: {name} -->\n")
        _, end, after = after.partition("\n<!-- end -->")
        text = before + mark + reference_table(fields) + end + after
    return text


if __name__ == "__main__":
    REFERENCE.write_text(with_tables(REFERENCE.read_text()))
