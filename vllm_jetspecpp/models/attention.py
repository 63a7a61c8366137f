"""Attention of many branches over one shared prefix, and rotary positions.

All branches of a request stand side by side in one query sequence; who sees what is a boolean mask, so that a round
has the same shapes whatever happens in it (invariant 3). Keys of a request are laid out as segments, for example
[verified prefix | predicted states | the branches' own blocks].
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class KeysValues(NamedTuple):
    """Keys (rotated) and values of one segment in one layer."""

    keys: Tensor  # [batch, num_kv_heads, length, head_dim]
    values: Tensor  # [batch, num_kv_heads, length, head_dim]


class Rope(NamedTuple):
    """Cosines and sines of the positions of a sequence."""

    cos: Tensor  # [batch, length, head_dim]
    sin: Tensor  # [batch, length, head_dim]


class RotaryTable(nn.Module):
    """Cosines and sines for positions 0..max_positions-1, from the target's own rotary module.

    Raises:
        ValueError: the rotary type changes with the sequence length, which a table cannot follow.
    """

    def __init__(self, hf_config: Any, max_positions: int, dtype: torch.dtype) -> None:
        super().__init__()
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        rope_type = hf_config.rope_parameters["rope_type"]
        if rope_type in ("dynamic", "longrope"):
            raise ValueError(f"rope_type {rope_type!r} is not supported; supported: default, linear, llama3, yarn")
        rotary = LlamaRotaryEmbedding(copy.copy(hf_config))
        cos, sin = rotary(torch.zeros(1, dtype=torch.float32), torch.arange(max_positions)[None])
        self.cos = nn.Buffer(cos[0].to(dtype), persistent=False)
        self.sin = nn.Buffer(sin[0].to(dtype), persistent=False)

    def forward(self, positions: Tensor) -> Rope:
        """Look up ``positions`` [batch, length] int64."""
        return Rope(self.cos[positions], self.sin[positions])


def rotate(x: Tensor, rope: Rope) -> Tensor:
    """Rotary embedding of ``x`` [batch, heads, length, head_dim], its halves rotated against each other."""
    cos, sin = rope.cos.unsqueeze(1), rope.sin.unsqueeze(1)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def additive(mask: Tensor, dtype: torch.dtype, group: int) -> Tensor:
    """A mask as what is added to scores, made once for many layers.

    Args:
        mask: [batch, length, num_keys] bool, True where a query sees a key.
        group: query heads for each key head.

    Returns:
        [batch, group * length, num_keys]: 0 where a query sees a key, else -inf.
    """
    bias = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, float("-inf"))
    return bias.repeat(1, group, 1)


def attend(queries: Tensor, segments: list[KeysValues], mask: Tensor) -> Tensor:
    """Grouped-query attention over the concatenated segments.

    Args:
        queries: [batch, num_heads, length, head_dim].
        segments: their lengths add up to ``num_keys``.
        mask: [batch, length, num_keys] bool, True where a query sees a key, or :func:`additive` of it; every query
            sees at least one key.

    Returns:
        [batch, num_heads, length, head_dim].
    """
    keys = torch.cat([s.keys for s in segments], dim=2)
    values = torch.cat([s.values for s in segments], dim=2)
    batch, heads, length, head_dim = queries.shape
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    bias = additive(mask, queries.dtype, group) if mask.dtype is torch.bool else mask
    # The heads of a group become further queries of their key head: no key is copied for them.
    grouped = queries.reshape(batch, kv_heads, group * length, head_dim)
    bias = bias.unsqueeze(1)
    if queries.is_cuda:
        out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=bias)
    else:
        # PyTorch's fused kernel takes twice as long on a CPU at these shapes (few queries, docs/LOG.md).
        bias = bias.expand(-1, kv_heads, -1, -1).flatten(0, 1)
        scores = torch.baddbmm(bias, grouped.flatten(0, 1), keys.flatten(0, 1).transpose(1, 2), alpha=head_dim**-0.5)
        out = torch.bmm(scores.softmax(-1), values.flatten(0, 1))
    return out.reshape(batch, heads, length, head_dim)


def causal_blocks(num_blocks: int, block_size: int, device: torch.device) -> Tensor:
    """Who sees whom among blocks that stand side by side: [num_blocks * block_size]² bool, causal inside a block."""
    inside = torch.ones(block_size, block_size, dtype=torch.bool, device=device).tril()
    return torch.block_diag(*[inside] * num_blocks).bool()


def whole_blocks(num_blocks: int, block_size: int, device: torch.device) -> Tensor:
    """As :func:`causal_blocks`, but every position of a block sees the whole block."""
    inside = torch.ones(block_size, block_size, dtype=torch.bool, device=device)
    return torch.block_diag(*[inside] * num_blocks).bool()
