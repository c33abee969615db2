"""Publish copies of a fitted model, and tiny versions that only a store can read."""

from pathlib import Path

from model_store.artifacts.manifest import FILES, Description
from model_store.artifacts.store import ModelStore


def publish_again(
    store: ModelStore, source: Path, name: str = "digits", alias: str = "latest", **files: bytes
) -> str:
    """Publish `digits` version 1 of another store as a new version, and return its number.

    `files` replace graphs by their stem.
    """
    artifact = ModelStore(source).open("digits", "1")
    description = Description(
        **{field: getattr(artifact.manifest, field) for field in Description.model_fields}
    )
    replacements = {f"{stem}.onnx": content for stem, content in files.items()}
    return store.publish(
        name, description, {file: artifact.files[file] for file in FILES} | replacements, alias
    ).version


def tiny_files() -> dict[str, bytes]:
    """Return the files of a version that only a store can read."""
    return {file: f"the bytes of {file}".encode() for file in FILES}


def tiny_description() -> Description:
    return Description.model_validate(
        {
            "method": "test",
            "task": "classification",
            "input": {"shape": [2, 3], "minimum": 0, "maximum": 1},
            "output": {"classes": ["no", "yes"]},
            "noise": {
                "algorithm": "none",
                "dimension": 1,
                "theta_dimension": 1,
                "paired": True,
                "default_draws": 3,
            },
            "detectors": {
                "density": [],
                "combined": ["bald"],
                "draw_counts": [1, 3],
                "reference_rows": 10,
                "ranking_rows": 10,
                "smallest_fpr": 1 / 11,
            },
            "abstention": {"confidence": 0.95, "smallest_risk": 0.4},
            "training": {"note": "Ünïcode", "nested": {"steps": [1, 2.5, None]}},
            "quality": {"test_accuracy": 0.5},
            "parity": {"theta": 0.0},
        }
    )
