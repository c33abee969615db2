"""Checkpoints, stored as safetensors files with JSON metadata."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from model_store.artifacts.disk import replace_file
from model_store.errors import InvalidInput


def write_checkpoint(path: Path, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
    content = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    replace_file(path, save(content, metadata={"facts": json.dumps(facts)}))


def read_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read the tensors and metadata of a checkpoint.

    Raises:
        InvalidInput: if the file is not a checkpoint.
    """
    try:
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
            return tensors, json.loads((file.metadata() or {})["facts"])
    except (SafetensorError, ValueError, KeyError):
        expected = "a checkpoint (delete it to start the fit again)"
        raise InvalidInput(str(path), expected, "an unreadable file") from None


def module_tensors(module: nn.Module, prefix: str) -> dict[str, Tensor]:
    return {f"{prefix}.{name}": t.detach().clone() for name, t in module.state_dict().items()}


def load_module(module: nn.Module, tensors: dict[str, Tensor], prefix: str) -> None:
    start = f"{prefix}."
    state = {name.removeprefix(start): t for name, t in tensors.items() if name.startswith(start)}
    module.load_state_dict(state)


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    state = optimizer.state_dict()["state"]
    return {
        f"optimizer.{i}.{name}": tensor
        for i, parts in state.items()
        for name, tensor in parts.items()
    }


def load_optimizer(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    state: dict[int, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        if key.startswith("optimizer."):
            _, index, name = key.split(".", 2)
            state.setdefault(int(index), {})[name] = tensor
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
