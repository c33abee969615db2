"""Random modules of `torch.nn` layers."""

import random
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

Shape = Sequence[int]
CLASSES = 3

ACTIVATIONS = (
    "CELU ELU GELU Hardshrink Hardsigmoid Hardswish Hardtanh Identity LeakyReLU LogSigmoid Mish "
    "PReLU RReLU ReLU "
    "ReLU6 SELU SiLU Sigmoid Softplus Softshrink Softsign Tanh Tanhshrink Dropout AlphaDropout "
    "FeatureAlphaDropout"
)


class First(nn.Module):
    """Return the first output of a layer, such as a GRU's values."""

    def __init__(self, inner: nn.Module, copies: int = 1) -> None:
        super().__init__()
        self.inner = inner
        self.copies = copies

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(*[x] * self.copies)[0]


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class InParallel(nn.Module):
    """Concatenate the outputs of two layers along the last axis."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.first(x), self.second(x)], dim=-1)


class WithUnusedLayer(nn.Module):
    """A module with a layer that is never used."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.unused = inner, nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Operation(nn.Module):
    """An operation in `forward` that is not a layer."""

    def __init__(self, name: str, size: int) -> None:
        super().__init__()
        self.name = name
        self.layer = nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        match self.name:
            case "attention":
                return functional.scaled_dot_product_attention(h, h, x)
            case "twice":
                return self.layer(h)
            case "weight":
                return functional.linear(h, self.layer.weight)
            case "random":
                return h + torch.randn_like(h)
            case "control":
                return h if float(x.abs().max()) < 1e9 else x
            case "rows":
                return h - x.mean(0)
            case "sorted":
                return h.sort(dim=-1).values
            case "normal":
                return h / (1e-3 + torch.linalg.vector_norm(h, dim=-1, keepdim=True))
            case "cumulative":
                return h.cumsum(-1)
        return h.clamp(-1, 1) * torch.sin(x)


OPERATIONS = "attention twice weight random control rows sorted normal cumulative sine"

# Layers by kind of input, as expressions of the sizes of its first and last axes.
ANY = (
    *(f"nn.{name}()" for name in ACTIVATIONS.split()),
    *(f"nn.{name}(-1)" for name in ("Softmax", "Softmin", "LogSoftmax", "GLU")),
    *(f"nn.{name}(last)" for name in ("LayerNorm", "RMSNorm")),
    *(f"Operation('{name}', last)" for name in OPERATIONS.split()),
    *("nn.Linear(last, 5)", "nn.Linear(last, 4, bias=False)", "Residual(nn.Linear(last, last))"),
    "InParallel(nn.Linear(last, 3), nn.Linear(last, 2))",
    *("nn.Threshold(0.1, 0.0)", "nn.Flatten()", "nn.Unflatten(-1, (2, last // 2))"),
    *("nn.Embedding(10, 4)", "nn.utils.parametrizations.weight_norm(nn.Linear(last, 4))"),
)
ROWS = ("nn.BatchNorm1d(first)", "First(nn.GRUCell(first, 4))", "nn.CircularPad1d(1)")
STEPS = (
    *(f"nn.{name}(first, 4, 3, padding=1)" for name in ("Conv1d", "ConvTranspose1d")),
    *(f"nn.{name}(first)" for name in ("BatchNorm1d", "InstanceNorm1d")),
    *("nn.GroupNorm(2, first)", "nn.LocalResponseNorm(2)"),
    *(f"nn.{name}(2)" for name in ("MaxPool1d", "AvgPool1d", "Dropout1d")),
    *(f"nn.{name}(3)" for name in ("AdaptiveAvgPool1d", "AdaptiveMaxPool1d")),
    "nn.LPPool1d(2, 2)",
    *(f"nn.{kind}Pad1d(1)" for kind in ("Reflection", "Replication", "Zero", "Circular")),
    "nn.ConstantPad1d(1, 0.5)",
    *(f"First(nn.{name}(last, 4, batch_first=True))" for name in ("RNN", "GRU", "LSTM")),
    "First(nn.GRU(last, 2, batch_first=True, bidirectional=True))",
    "First(nn.MultiheadAttention(last, 1, batch_first=True), 3)",
    "nn.TransformerEncoderLayer(last, 1, 8, batch_first=True)",
    *("nn.Upsample(scale_factor=2)", "nn.ChannelShuffle(2)"),
)
IMAGES = (
    *(f"nn.{name}(first, 4, 3, padding=1)" for name in ("Conv2d", "ConvTranspose2d")),
    "nn.Conv2d(first, 4, (2, 3), stride=(1, 2), bias=False)",
    "nn.Conv2d(first, first, 3, padding='same', groups=first)",
    "nn.Conv2d(first, 2, 3, padding=1, padding_mode='circular')",
    "Residual(nn.Conv2d(first, first, 3, padding=1))",
    *(f"nn.{name}(first)" for name in ("BatchNorm2d", "InstanceNorm2d")),
    *("nn.GroupNorm(2, first)", "nn.LocalResponseNorm(2)", "nn.CrossMapLRN2d(2)"),
    *(f"nn.{name}(2)" for name in ("MaxPool2d", "AvgPool2d", "PixelUnshuffle", "Unfold")),
    *(f"nn.{name}(2)" for name in ("AdaptiveAvgPool2d", "AdaptiveMaxPool2d", "PixelShuffle")),
    *("nn.AdaptiveAvgPool2d(1)", "nn.LPPool2d(2, 2)", "nn.FractionalMaxPool2d(2, output_size=2)"),
    *(f"nn.{kind}Pad2d(1)" for kind in ("Reflection", "Replication", "Zero", "Circular")),
    *("nn.ConstantPad2d(1, 0.5)", "nn.Dropout2d()", "nn.Softmax2d()"),
    *("nn.Upsample(scale_factor=2, mode='bilinear')", "nn.UpsamplingNearest2d(scale_factor=2)"),
    "nn.ChannelShuffle(2)",
)
BY_AXES = {1: ANY + ROWS, 2: ANY + 2 * STEPS, 3: ANY + 2 * IMAGES, 4: ANY}


def random_module(seed: int) -> tuple[nn.Module, tuple[int, ...]]:
    """Create a module of up to seven layers. Return it with its input shape."""
    rng = random.Random(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        shape = rng.choice([(4,), (4, 6), (2, 6, 6)])
        layers: list[nn.Module] = []
        current: tuple[int, ...] = shape
        for _ in range(rng.randrange(1, 5)):
            candidate = _layer(rng, [*layers], current)
            if candidate is not None:
                layer, current = candidate
                layers.append(layer)
        layers.append(nn.Flatten())
        layers.append(nn.Linear(int(torch.Size(current).numel()), CLASSES))
        if rng.random() < 0.05:
            layers.append(layers[-1] if rng.random() < 0.5 else nn.Linear(CLASSES, CLASSES))
        module = nn.Sequential(*layers)
        return (WithUnusedLayer(module) if rng.random() < 0.05 else module), shape


def _layer(
    rng: random.Random, layers: list[nn.Module], shape: Shape
) -> tuple[nn.Module, tuple[int, ...]] | None:
    for _ in range(20):
        try:
            expression = rng.choice(BY_AXES[len(shape)])
            layer = eval(expression, globals(), {"first": shape[0], "last": shape[-1]}).eval()
            output = layer(torch.zeros(2, *shape))
        except (RuntimeError, ValueError, TypeError, IndexError, AssertionError, ZeroDivisionError):
            continue
        if (
            isinstance(output, Tensor)
            and len(output) == 2
            and 2 <= output.ndim <= 5
            and 1 <= output[0].numel() <= 400
        ):
            return layer, tuple(output.shape[1:])
    return None
