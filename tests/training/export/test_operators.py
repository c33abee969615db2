import pytest
import torch
from torch import nn
from torch.nn import functional as F

from model_store.inference.graphs import find_problem
from training.export.exporter import ExportSubstitutes, export_graph

ACTIVATIONS = (
    "ReLU GELU SiLU ELU SELU CELU Hardtanh Hardswish Hardsigmoid LeakyReLU LogSigmoid Mish PReLU "
    "ReLU6 Sigmoid "
    "Softplus Softshrink Softsign Tanh Tanhshrink Hardshrink"
)


class Layers(nn.Module):
    """Apply many layer types to rows of shape (4, 16)."""

    def __init__(self):
        super().__init__()
        self.step_layers = nn.ModuleList(
            [
                nn.Conv1d(4, 4, 3, padding=1),
                nn.ConvTranspose1d(4, 4, 3, padding=1),
                nn.GroupNorm(2, 4),
                nn.InstanceNorm1d(4),
                nn.BatchNorm1d(4),
                nn.LayerNorm(16),
                nn.RMSNorm(16),
                nn.LocalResponseNorm(2),
                nn.MaxPool1d(3, 1, 1),
                nn.AvgPool1d(3, 1, 1),
                nn.LPPool1d(2, 3, 1),
                nn.AdaptiveAvgPool1d(16),
                nn.ReflectionPad1d(1),
                nn.Dropout(),
                nn.GLU(-1),
                nn.Softmax(-1),
                nn.LogSoftmax(-1),
                *(getattr(nn, name)() for name in ACTIVATIONS.split()),
                nn.TransformerEncoderLayer(16, 2, 32, batch_first=True),
            ]
        )
        self.sequence_layers = nn.ModuleList(
            [
                nn.GRU(16, 16, batch_first=True),
                nn.LSTM(16, 16, batch_first=True, bidirectional=True),
                nn.RNN(16, 16, batch_first=True),
            ]
        )
        self.picture_layers = nn.ModuleList(
            [
                nn.Conv2d(1, 4, 3, padding=1),
                nn.Upsample(scale_factor=2, mode="bilinear"),
                nn.Upsample(scale_factor=2),
                nn.PixelUnshuffle(2),
                nn.Unfold(2),
                nn.AdaptiveMaxPool2d(1),
            ]
        )
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.embedding, self.bilinear = nn.Embedding(8, 16), nn.Bilinear(16, 16, 4)

    def forward(self, x):
        h = x.view(-1, 4, 16)
        indices = (h > 0).long()
        parts = [layer(h) for layer in self.step_layers]
        parts += [layer(h)[0] for layer in self.sequence_layers]
        parts += [layer(h.unsqueeze(1)) for layer in self.picture_layers]
        parts += [
            self.attention(h, h, h)[0],
            self.embedding(indices[:, 0]),
            self.bilinear(h[:, 0], h[:, 1]),
            torch.einsum("nab,ncb->nac", h, h),
            h.cumsum(-1),
            h.topk(3).values,
            h.gather(1, indices),
            h.tril().roll(1, -1).flip(1),
            h.masked_fill(h > 1, 0).var(-1),
            h.logsumexp(-1),
            F.one_hot(indices[:, 0], 2).float(),
            F.grid_sample(h.unsqueeze(1), h.tanh().reshape(-1, 4, 8, 2)),
            torch.fft.rfft(h).abs(),
        ]
        return torch.cat([part.flatten(1) for part in parts], dim=1)


@pytest.mark.slow
def test_common_layers_export_to_supported_operators():
    rows = torch.export.Dim("rows")
    assert (
        find_problem(export_graph(Layers().eval(), (torch.randn(3, 64),), {"x": {0: rows}}, ["y"]))
        is None
    )


@pytest.mark.parametrize("reduce", [torch.mean, torch.sum, torch.Tensor.mean])
@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("axes", [1, (1,), (0, 2), [-4, 2], -1, (2, 3), (0, 1, 2, 3)])
def test_reduction_substitutes_match_torch(reduce, axes, keepdim):
    x = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0))
    expected = reduce(x, axes, keepdim), reduce(x, dim=axes, keepdim=keepdim, dtype=torch.float64)
    with ExportSubstitutes():
        actual = (
            reduce(x, axes, keepdim),
            reduce(x, dim=axes, keepdim=keepdim, dtype=torch.float64),
        )
        assert torch.equal(x.mean(), torch.mean(x))
        assert x.sum(dtype=torch.float64).dtype == torch.float64
    for item, reference in zip(actual, expected, strict=True):
        assert item.dtype == reference.dtype
        torch.testing.assert_close(item, reference)
