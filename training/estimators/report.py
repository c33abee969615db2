"""The report of an estimator: how good its model is, and what speaks against it."""

from model_store.artifacts.manifest import Description
from training.evaluation.text import Block, Table
from training.publishing.baselines import lines


def report_of(description: Description) -> list[Block]:
    rows = description.training["rows"]["test"]
    quality = [[name, f"{value:.4g}"] for name, value in description.quality.items()]
    plain = lines(description)
    return [
        f"# {description.method}",
        Table([f"On {rows} test rows", ""], quality),
        *(["## Plain models", "\n".join(f"* {line}" for line in plain)] if plain else []),
        *(f"Note: {warning}." for warning in description.warnings),
        *([] if description.too_few_rows is None else [f"Note: {description.too_few_rows}."]),
    ]
