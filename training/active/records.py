"""What is kept of an arm and a seed: a line for each finished round, and what the next round goes
on from.

`NAME.jsonl` has a round a line, in order; `NAME-ROUND.safetensors` has the weights and the
optimiser after the last one. The weights are there before the line is written, so whenever the
process is killed, what is there are finished rounds, and the next one begins as if nothing had
happened.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from torch import Tensor

from model_store.errors import InvalidInput
from training.active.protocol import Arm
from training.fitting.checkpoint import read_checkpoint, write_checkpoint


@dataclass(frozen=True)
class Round:
    """A finished round: which rows got labels, and how good the model fitted on all labels so far
    is."""

    labels: int  # so far
    metric: float  # accuracy, or root mean squared error
    log_likelihood: float  # nats a test row
    rows: list[int]  # of the training rows, that got their labels in this round
    choose_s: float
    fit_s: float
    measure_s: float


class Record:
    """The rounds of an arm and a seed, in a folder."""

    def __init__(self, folder: Path, name: str) -> None:
        """Read what is there; a last line that was not written to its end is not there."""
        self.path = folder / f"{name}.jsonl"
        self.rounds: list[Round] = []
        content = self.path.read_bytes() if self.path.exists() else b""
        whole = content[: content.rfind(b"\n") + 1]
        try:
            self.rounds = [Round(**json.loads(line)) for line in whole.splitlines()]
        except (ValueError, TypeError):
            raise InvalidInput(
                str(self.path), "rounds, one a line (delete it to begin anew)", "others"
            ) from None
        self._size = len(whole)

    @property
    def labelled(self) -> list[int]:
        """The rows that have labels."""
        return [row for done in self.rounds for row in done.rows]

    def tensors(self) -> dict[str, Tensor]:
        """Return what the last round left."""
        return read_checkpoint(self._weights(len(self.rounds) - 1))[0]

    def add(self, done: Round, tensors: dict[str, Tensor]) -> None:
        """Keep a round, and after it what the next one goes on from."""
        number = len(self.rounds)
        write_checkpoint(self._weights(number), tensors, {})
        with self.path.open("ab") as file:
            file.truncate(self._size)
            self._size += file.write(f"{json.dumps(asdict(done))}\n".encode())
            file.flush()
            os.fsync(file.fileno())
        self.rounds.append(done)
        for path in self._all_weights():
            if path != self._weights(number):
                path.unlink()

    def _weights(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.stem}-{number:04d}.safetensors")

    def _all_weights(self) -> Iterator[Path]:
        return self.path.parent.glob(f"{self.path.stem}-[0-9][0-9][0-9][0-9].safetensors")


@dataclass(frozen=True, eq=False)
class Curves:
    """An arm's rounds by seed; seeds without a round are left out."""

    arm: Arm
    seeds: dict[int, list[Round]]

    @property
    def counts(self) -> list[int]:
        """Numbers of labels that every seed came to."""
        shortest = min(self.seeds.values(), key=len)
        return [done.labels for done in shortest]

    def at(self, labels: int) -> list[float]:
        """Return the metric of each seed at a number of labels that all came to."""
        return [
            next(done.metric for done in rounds if done.labels == labels)
            for rounds in self.seeds.values()
        ]
