"""Small tokenizers, texts and a text network."""

import csv
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import nn

WORDS = {
    "good": ["good", "fine", "great", "lovely", "warm", "bright"],
    "bad": ["bad", "poor", "awful", "cold", "dull", "broken"],
    "any": ["the", "a", "film", "meal", "day", "was", "and", "it", "very", "so"],
}
SPECIAL = ["[PAD]", "[UNK]", "[CLS]"]
VOCABULARY = len(SPECIAL) + sum(map(len, WORDS.values()))


def tokenizer() -> Tokenizer:
    tokens = [*SPECIAL, *(word for words in WORDS.values() for word in words)]
    created = Tokenizer(
        models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="[UNK]")
    )
    created.pre_tokenizer = pre_tokenizers.Whitespace()
    created.post_processor = processors.TemplateProcessing(
        single="[CLS] $A", special_tokens=[("[CLS]", 2)]
    )
    return created


def texts(count: int, seed: int = 0) -> tuple[list[str], list[str]]:
    rng = np.random.default_rng(seed)
    rows, labels = [], []
    for i in range(count):
        label = ("good", "bad")[i % 2]
        words = [
            *rng.choice(WORDS["any"], rng.integers(4, 7)),
            *rng.choice(WORDS[label], rng.integers(2, 4)),
        ]
        rows.append(" ".join(rng.permutation(words)))
        labels.append(label)
    return rows, labels


def write_reviews(folder: Path, count: int = 300) -> None:
    """Write `reviews.csv` with texts, labels and stars, and `tokenizer.json`."""
    tokenizer().save(str(folder / "tokenizer.json"))
    with (folder / "reviews.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label", "stars"])
        for i, row in enumerate(zip(*texts(count), strict=True)):
            writer.writerow([*row, i % 5])


class MeanEmbedding(nn.Module):
    """Average the embeddings of tokens, without padding."""

    def __init__(self, _: tuple[int, ...]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        is_token = (ids != 0).unsqueeze(2).float()
        return (self.embedding(ids) * is_token).sum(1) / is_token.sum(1).clamp(min=1.0)


class MeanEmbeddingNetwork(MeanEmbedding):
    """Mean embedding with a linear head."""

    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        super().__init__(shape)
        self.head = nn.Linear(8, outputs)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(super().forward(ids))
