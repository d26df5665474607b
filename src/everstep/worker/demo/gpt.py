"""A small GPT, written to be read: about a million parameters, pre-norm blocks, dropout. It knows nothing of text."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTConfig:
    """Sizes. `context` is the longest sequence in tokens; `width` is split evenly among the heads."""

    vocabulary_size: int
    context: int = 64
    layer_count: int = 5
    head_count: int = 4
    width: int = 128
    dropout: float = 0.1


class Attention(nn.Module):
    """Causal self-attention over several heads."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.head_count = config.head_count
        self.query_key_value = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.query_key_value(x).view(batch, length, 3, self.head_count, width // self.head_count)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """Attention, then a two-layer perceptron; each adds to the stream, with dropout on what it adds."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.perceptron_norm = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width, bias=False)
        self.down = nn.Linear(4 * config.width, config.width, bias=False)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.down(functional.gelu(self.up(self.perceptron_norm(x)))))


class GPT(nn.Module):
    """The model."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.token = nn.Embedding(config.vocabulary_size, config.width)
        self.place = nn.Embedding(config.context, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layer_count))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary_size, bias=False)
        self.register_buffer("places", torch.arange(config.context), persistent=False)
        self.apply(_initialise)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean cross-entropy of the next token, in nats.

        Args:
            tokens: [batch, length] of int64.
            targets: the same shape: for each place the token that comes next.
        """
        places = self.places[: tokens.shape[1]]  # type: ignore[index]  # a buffer
        x = self.dropout(self.token(tokens) + self.place(places))
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)


def parameter_count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
