"""Which fits get an encoder unasked, and what is said where there can be none."""

import numpy as np
import pytest
import torch
from torch import nn

from model_store.errors import InvalidInput
from tests.support.recipes import recipe_with
from training.data import Dataset, Rows
from training.fitting.encoding import with_encoder

SIDE = 66  # its square is more than 4,096


class Body(nn.Module):
    """A frozen layer and a head."""

    def __init__(self, shape, outputs):
        super().__init__()
        self.body, self.head = nn.Conv2d(1, 3, 3, stride=8), nn.Linear(3, outputs)

    def forward(self, x):
        return self.head(torch.relu(self.body(x)).amax((2, 3)))


class Choosing(Body):
    """A forward that cannot be followed."""

    def forward(self, x):
        return super().forward(x if x.sum() > -1e9 else -x)


class Eigenvalues(nn.Module):
    """An operator that ONNX does not have."""

    def __init__(self, shape, outputs):
        super().__init__()
        self.body, self.head = nn.Linear(SIDE, 3), nn.Linear(3, outputs)

    def forward(self, x):
        h = self.body(x[:, 0, :3])
        return self.head(self.values(h))

    def values(self, h):
        return torch.linalg.svdvals(h)


def recipe(factory=Body, **network):
    return recipe_with(
        network={
            "factory": f"{__name__}:{factory.__name__}",
            "bayesian": ["head"],
            "trained": [],
            **network,
        }
    )


def data(side=SIDE):
    x = np.random.default_rng(0).integers(0, 255, (40, side * side)).astype(np.uint8)
    rows = Rows(x, np.arange(40, dtype=np.int64) % 3)
    return Dataset(rows, rows, (side, side), ("a", "b", "c"), 0.0, 255.0)


def test_long_rows_of_frozen_layers_get_one(tmp_path):
    told, encoding = with_encoder(recipe(), data(), data().train, tmp_path)
    assert told.network.encoder == "frozen"
    assert encoding.spec.outputs == 3
    again, same = with_encoder(told, data(), data().train, tmp_path)
    assert (again, same.digest) == (told, encoding.digest)
    assert encoding.encoder(data().train.x[:5].astype(np.float32)).shape == (5, 3)


@pytest.mark.parametrize(
    ("recipe", "side"),
    [
        (recipe(), 8),
        (recipe(encoder="none"), SIDE),
        (
            recipe().model_copy(
                update={"network": recipe().network.model_copy(update={"trained": None})}
            ),
            SIDE,
        ),
        (recipe_with(network={"hidden": [5]}), SIDE),
        (recipe(Choosing), SIDE),
        (recipe(Eigenvalues), SIDE),
    ],
)
def test_others_get_none(tmp_path, recipe, side):
    assert with_encoder(recipe, data(side), data(side).train, tmp_path) == (recipe, None)


@pytest.mark.parametrize(
    ("factory", "says"),
    [
        (Choosing, "a network that can be cut in two, got .*cannot be followed"),
        (Eigenvalues, "that can be exported"),
    ],
)
def test_one_that_is_asked_for_and_cannot_be_is_one_line(tmp_path, factory, says):
    with pytest.raises(InvalidInput, match=rf"^network\.encoder: expected .*{says}") as refused:
        with_encoder(recipe(factory, encoder="frozen"), data(), data().train, tmp_path)
    assert "\n" not in str(refused.value)
