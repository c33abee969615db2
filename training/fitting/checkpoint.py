"""Checkpoints, stored in torch's format and read without executing code."""

import io
from pathlib import Path
from typing import Any

import torch

from model_store.artifacts.disk import replace_file
from model_store.errors import InvalidInput


def write_checkpoint(path: Path, content: dict[str, Any]) -> None:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    replace_file(path, buffer.getvalue())


def read_checkpoint(path: Path, device: torch.device) -> dict[str, Any]:
    """Read a checkpoint's tensors, numbers and texts.

    Raises:
        InvalidInput: if the file is not a checkpoint.
    """
    content = io.BytesIO(path.read_bytes())
    try:
        return dict(torch.load(content, map_location=device, weights_only=True))
    except Exception:  # torch raises many types for damaged files
        expected = "a checkpoint (delete it to start the fit again)"
        raise InvalidInput(str(path), expected, "an unreadable file") from None
