"""Networks that programs give: `training.networks.given:network_ID` is the factory of one, in the
process that was given it."""

from collections.abc import Callable
from hashlib import sha256

from safetensors.torch import save
from torch import nn

_NETWORKS: dict[str, nn.Module] = {}


def keep(network: nn.Module) -> str:
    """Keep a network, and return its factory for `network.factory`; ID depends on its weights."""
    tensors = {name: of.detach().clone().contiguous() for name, of in network.state_dict().items()}
    name = f"network_{sha256(save(tensors) + repr(network).encode()).hexdigest()[:16]}"
    _NETWORKS[name] = network
    return f"{__name__}:{name}"


def __getattr__(name: str) -> Callable[[tuple[int, ...], int], nn.Module]:
    from copy import deepcopy

    if name not in _NETWORKS:
        raise AttributeError(f"{name}: a network that another process was given")
    return lambda _shape, _outputs: deepcopy(_NETWORKS[name]).cpu()
