"""Networks cut in two: encoder and head together compute what the network does, wherever it is
cut."""

import pytest
import torch
from torch import nn

from training.networks.split import NotSplit, split_module

SHAPE, OUTPUTS = (3, 8, 8), 5


class Residual(nn.Module):
    """Blocks with skips, and a forward that reads the number of rows."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()) for _ in range(3)
        )
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.drop, self.head = nn.Dropout(0.2), nn.Linear(8, OUTPUTS)

    def forward(self, x):
        rows = x.size(0)
        h = self.norm(self.stem(x)) * self.scale
        for block in self.blocks:
            h = h + block(h)
        return self.head(self.drop(h.mean((2, 3)).view(rows, -1)))


class Masked(nn.Module):
    """A head that takes three things: whole numbers, a value a row, and what attention says."""

    def __init__(self):
        super().__init__()
        self.body = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)
        self.head = nn.Linear(8, OUTPUTS)

    def forward(self, x):
        h = self.body(x[:, 0])
        ids, level = h.argmax(2), h.mean((1, 2))
        outputs = self.head(h[:, -1])
        return outputs + ids.sum(1, keepdim=True) + level.unsqueeze(1)


def rows(n=6):
    return torch.randn(n, *SHAPE, generator=torch.Generator().manual_seed(0))


def made(module):
    torch.manual_seed(1)
    return module().eval()


@pytest.mark.parametrize(
    ("module", "stays", "width"),
    [
        (Residual, ["head"], 8),
        (Residual, ["blocks.2.0", "head"], 512),
        (Residual, ["blocks.1.0", "blocks.2.0", "head"], 512),
        (Residual, ["drop", "head"], 8),
        (Masked, ["head"], 8 + 1 + 1),
    ],
)
def test_both_parts_compute_what_the_whole_does(module, stays, width):
    network = made(module)
    found = split_module(network, stays, rows())
    assert found is not None
    assert found.width == width
    encoded = found.encoder(rows())
    assert encoded.shape == (6, width)
    assert encoded.dtype == torch.float32
    torch.testing.assert_close(found.head(encoded), network(rows()))
    torch.testing.assert_close(found.head(encoded[:1]), network(rows()[:1]))
    names = {name for name, _ in found.head.named_modules()}
    assert set(stays) <= names
    assert not {"stem", "body"} & names


def test_a_head_of_one_layer_after_the_other_is_a_sequence():
    network = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    found = split_module(network, ["2"], torch.randn(4, 4))
    assert isinstance(found.head, nn.Sequential)
    assert list(dict(found.head.named_children())) == ["2"]


def test_the_network_itself_stays_as_it_is():
    network = made(Residual).train()
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    found = split_module(network, ["head"], rows())
    with torch.no_grad():
        found.head.head.weight.zero_()
    assert network.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())


def test_without_weights_before_the_head_there_is_nothing_to_encode():
    assert split_module(made(Residual), ["stem", "head"], rows()) is None


class Choosing(Residual):
    """A forward that depends on values."""

    def forward(self, x):
        return self.head(self.stem(x).mean((2, 3)) if x.sum() > 0 else x[:, 0, :, 0])


class Again(Residual):
    """A head that takes the row itself."""

    def forward(self, x):
        return self.head(self.stem(x).mean((2, 3))) + self.head(x[:, 0, 0])


class Mixing(Residual):
    """A head that takes what is of all rows together."""

    def forward(self, x):
        h = self.stem(x).mean((2, 3))
        return self.head(h) + h.max()


@pytest.mark.parametrize(
    ("module", "says"),
    [(Choosing, "cannot be followed"), (Mixing, "no row of numbers for each row")],
)
def test_what_cannot_be_cut_says_why(module, says):
    with pytest.raises(NotSplit, match=says):
        split_module(made(module), ["head"], rows())


def test_a_head_may_take_parts_of_the_row_beside():
    found = split_module(made(Again), ["head"], rows())
    torch.testing.assert_close(found.head(found.encoder(rows())), made(Again)(rows()))
