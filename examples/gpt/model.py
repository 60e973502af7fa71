"""A byte-level GPT, divided into pipeline stages.

Every layer's initial weights depend on the seed and the layer alone, not on how the layers are spread over the stages:
any pipeline depth starts from the same model.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

VOCABULARY = 256  # bytes


@dataclass(frozen=True)
class GPTConfig:
    layers: int = 6
    width: int = 64
    heads: int = 4
    seq: int = 64
    seed: int = 0


class Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.norm1 = nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.proj = nn.Linear(config.width, config.width)
        self.norm2 = nn.LayerNorm(config.width)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, 4 * config.width), nn.GELU(), nn.Linear(4 * config.width, config.width)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, seq, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        attended = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).reshape(batch, seq, width))
        return x + self.mlp(self.norm2(x))


class Embedding(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, config.width)
        self.position = nn.Embedding(config.seq, config.width)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.token(tokens) + self.position.weight[: tokens.shape[1]]


class Head(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.width)
        self.logits = nn.Linear(config.width, VOCABULARY, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.logits(self.norm(x))


def build_stage(config: GPTConfig, index: int, count: int) -> nn.Sequential:
    """Stage `index` of `count`: an equal run of blocks; the first stage also embeds, the last also has the head."""
    if config.layers < count:
        raise SystemExit(f"--layers {config.layers}: at least one layer for each of the {count} pipeline stages")
    first, last = config.layers * index // count, config.layers * (index + 1) // count
    # Named by their index in the complete model, so that all stages together form one checkpoint.
    parts = OrderedDict(
        (f"block{layer}", _initialised(Block(config), config.seed, layer)) for layer in range(first, last)
    )
    if index == 0:
        parts["embedding"] = _initialised(Embedding(config), config.seed, config.layers)
        parts.move_to_end("embedding", last=False)
    if index == count - 1:
        parts["head"] = _initialised(Head(config), config.seed, config.layers + 1)
    return nn.Sequential(parts)


def _initialised(module: nn.Module, seed: int, layer: int) -> nn.Module:
    generator = torch.Generator().manual_seed(seed * 1_000_003 + layer)
    for name, parameter in module.named_parameters():
        if parameter.dim() == 2:  # matrices and embeddings; norms keep their initial ones
            nn.init.normal_(parameter, std=0.02, generator=generator)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)
    return module
