"""Checkpoints, stored as safetensors files.

The metadata contains the nested content as JSON, where each tensor is replaced by its name.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from model_store.artifacts.disk import replace_file
from model_store.errors import InvalidInput


def write_checkpoint(path: Path, content: dict[str, Any]) -> None:
    """Write nested dictionaries and lists of tensors, numbers and texts."""
    tensors: dict[str, Tensor] = {}

    def encode(value: Any) -> Any:
        if isinstance(value, Tensor):
            name = str(len(tensors))
            tensors[name] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
            return {"tensor": name}
        if isinstance(value, dict):  # as pairs, because keys can be numbers
            return {"dict": [[key, encode(item)] for key, item in value.items()]}
        if isinstance(value, list | tuple):
            return [encode(item) for item in value]
        return value

    encoded = json.dumps(encode(content))
    replace_file(path, save(tensors, metadata={"content": encoded}))


def read_checkpoint(path: Path, device: torch.device) -> dict[str, Any]:
    def decode(value: Any) -> Any:
        if isinstance(value, list):
            return [decode(item) for item in value]
        if not isinstance(value, dict):
            return value
        if "tensor" in value:
            return file.get_tensor(value["tensor"])
        return {key: decode(item) for key, item in value["dict"]}

    try:
        with safe_open(path, "pt", device=str(device)) as file:
            return dict(decode(json.loads((file.metadata() or {})["content"])))
    except (SafetensorError, ValueError, KeyError):
        expected = "a checkpoint (delete it to start the fit again)"
        raise InvalidInput(str(path), expected, "an unreadable file") from None
