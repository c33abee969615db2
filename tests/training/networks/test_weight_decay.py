import pytest
import torch
from torch import nn

from model_store.errors import InvalidInput
from training.bayes.layers import Stochastic
from training.networks.networks import DrawnNetwork

PRIOR_STD = 2.0


class RepeatedDropout(nn.Module):
    """A module whose Dropout layer runs twice."""

    def __init__(self):
        super().__init__()
        self.first, self.last, self.drop = nn.Linear(4, 4), nn.Linear(4, 3), nn.Dropout(0.5)

    def forward(self, x):
        return self.last(self.drop(torch.relu(self.first(self.drop(x)))))


def decay(module, shape, **rates):
    return DrawnNetwork(module, Stochastic("masks", **rates), shape).weight_decay(PRIOR_STD) * (
        2 * PRIOR_STD**2
    )


def test_masks_scale_the_decay_of_each_layer():
    module = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    expected = module[0].weight.square().sum() / 0.9 + module[2].weight.square().sum() / 0.6
    torch.testing.assert_close(decay(module, (3,), rate=0.4, input_rate=0.1), expected)


def test_dropout_layers_scale_the_decay_of_the_next_layer():
    module = nn.Sequential(
        *(
            nn.Conv2d(1, 3, 3),
            nn.Dropout2d(0.25),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(3, 2, 1),
            nn.ReLU(),
        ),
        *(nn.Flatten(), nn.Linear(8, 5), nn.ReLU(), nn.Dropout(0.5), nn.Linear(5, 3)),
    )
    squares = [p.square().sum() for p in module.parameters() if p.ndim > 1]
    expected = squares[0] + squares[1] / 0.75 + squares[2] + squares[3] / 0.5
    torch.testing.assert_close(decay(module, (1, 6, 6)), expected)


@pytest.mark.parametrize("rate", [0.05, 0.2, 0.5])
def test_weight_decay_matches_the_exact_kl_of_dropout(rate):
    network = DrawnNetwork(nn.Linear(3, 2, bias=False), Stochastic("masks", input_rate=rate), (3,))
    masks = torch.cartesian_prod(*[torch.tensor([0.0, 1.0])] * 3)
    probability = torch.where(masks > 0, 1 - rate, rate).prod(1)
    weights = network(torch.eye(3), (masks / (1 - rate))[:, None])
    # E[-log p(W)] of a narrow Gaussian around each draw, up to the same constant
    expected = probability @ weights.square().sum((1, 2)) / (2 * PRIOR_STD**2)
    torch.testing.assert_close(network.weight_decay(PRIOR_STD), expected)


def test_dropout_that_runs_twice_is_rejected():
    with pytest.raises(InvalidInput, match="layer drop: Dropout: it runs 2 times; use a separate"):
        DrawnNetwork(RepeatedDropout(), Stochastic("masks"), (4,))
