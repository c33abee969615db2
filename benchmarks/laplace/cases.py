"""What is compared: small networks that are fitted first, alike in every process, and MNIST's of a
store."""

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from model_store.artifacts.store import ModelStore
from training.data import load, split, split_sizes
from training.posteriors.laplace import Structure
from training.versions import open_parent

INPUTS, HIDDEN, ROWS, STEPS = 20, 128, 10_000, 300
JUDGED = 200  # rows on which probabilities are compared


@dataclass(frozen=True)
class Case:
    """A structure over the last layer, or over all of a network without biases."""

    structure: Structure
    outputs: int = 10  # 1: a regression
    of_all: bool = False
    of_mnist: bool = False

    @property
    def name(self) -> str:
        """Its name in the table."""
        of = "MNIST's 800-10" if self.of_mnist else f"{HIDDEN}-{self.outputs}"
        layers = f"all of {INPUTS}-{of}, no biases" if self.of_all else f"last, {of}"
        return f"{self.structure}, {layers}{', regression' if self.outputs == 1 else ''}"


CASES = [
    *(Case(structure) for structure in ("full", "kronecker", "diagonal")),
    *(Case(structure, outputs=1) for structure in ("full", "kronecker", "diagonal")),
    *(Case(structure, of_all=True) for structure in ("kronecker", "diagonal")),
    *(Case(structure, of_mnist=True) for structure in ("kronecker", "diagonal")),
]


def without_biases(shape: tuple[int, ...], outputs: int) -> nn.Module:
    """Return a network of two layers without biases."""
    return nn.Sequential(
        nn.Linear(shape[0], HIDDEN, bias=False), nn.ReLU(), nn.Linear(HIDDEN, outputs, bias=False)
    )


def with_biases(shape: tuple[int, ...], outputs: int) -> nn.Module:
    """Return a network of two layers."""
    return nn.Sequential(nn.Linear(shape[0], HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, outputs))


def problem(case: Case) -> tuple[nn.Sequential, tuple[Tensor, Tensor], Tensor]:
    """Return a case's fitted network, its training rows and targets, and rows to be judged."""
    if case.of_mnist:
        return _mnist()
    torch.manual_seed(0)
    x = torch.randn(ROWS + JUDGED, INPUTS)
    teacher = nn.Sequential(nn.Linear(INPUTS, 30), nn.Tanh(), nn.Linear(30, case.outputs))
    with torch.no_grad():
        truth = 3.0 * teacher(x)
    y = (
        truth[:, 0] + 0.3 * torch.randn(len(x))
        if case.outputs == 1
        else torch.multinomial(truth.softmax(1), 1)[:, 0]
    )
    made = (without_biases if case.of_all else with_biases)((INPUTS,), case.outputs)
    assert isinstance(made, nn.Sequential)
    optimizer = torch.optim.Adam(made.parameters(), 3e-3)
    for _ in range(STEPS):
        rows = torch.randint(0, ROWS, (256,))
        given = made(x[rows])
        loss = (
            (given[:, 0] - y[rows]).square().mean()
            if case.outputs == 1
            else nn.functional.cross_entropy(given, y[rows])
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return made.eval(), (x[:ROWS], y[:ROWS]), x[ROWS:]


def _mnist() -> tuple[nn.Sequential, tuple[Tensor, Tensor], Tensor]:
    """Return the network of the store's `mnist-mle`, and its rows as it takes them."""
    parent = open_parent(
        ModelStore(Path(os.environ.get("DUBITO_STORE", "models"))), "mnist-mle", "store"
    )
    data = load(parent.recipe, Path(os.environ.get("DUBITO_DATA", "data")), ())
    train = split(data, split_sizes(parent.recipe)).train
    network = parent.model().network
    made = network.members[0]
    assert isinstance(made, nn.Sequential)
    x, judged = (
        (torch.from_numpy(rows).float() - network.mean) / network.std
        for rows in (train.x, data.test.x)
    )
    return made.eval(), (x, torch.from_numpy(train.y)), judged[:JUDGED]
