"""What a job is asked to do, as it is kept: all that its process needs to know, whatever settings
say by then."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from model_store.conformal.stopping import StoppingRule
from model_store.inference.prediction import DecisionOptions

Format = Literal["parquet", "npz"]


@dataclass(frozen=True)
class Asked:
    """A job's request. Files of its own are named alone, those of the operator's folder by their
    whole path."""

    model: str
    version: str
    num_samples: int
    seed: int
    field: str  # of the request, that rows came by
    path: str
    stamp: str | None  # of the operator's file
    rows: int
    read_as: str
    ignored: list[str]
    priors: tuple[float, ...] | None = None
    # of /acquire/jobs
    acquisition: str = ""
    k: int = 0
    race: float | None = None
    beta: float = 1.0
    selected: bool = (
        False  # whether the folder has a file of the rows that are ranked and set aside
    )
    excluded: int = 0  # rows that were labelled already
    keep: bool = False  # the rows that are answered
    # of /predict/jobs
    options: DecisionOptions | None = None
    format: Format = "npz"

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON holds it."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "Asked":
        """Return what `to_json` made."""
        priors = content["priors"]
        options = options_of(content["options"])
        return cls(
            **{**content, "options": options, "priors": None if priors is None else tuple(priors)}
        )


def options_of(content: dict[str, Any] | None) -> DecisionOptions | None:
    """Return options that came from JSON."""
    if content is None:
        return None
    rule, priors = content["rule"], content["priors"]
    return DecisionOptions(
        **{
            **content,
            "rule": None if rule is None else StoppingRule(**rule),
            "priors": None if priors is None else tuple(priors),
        }
    )
