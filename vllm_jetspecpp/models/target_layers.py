"""A decoder layer of the target's family (Llama type or Qwen3 dense), with Hugging Face's parameter names.

Unlike the library's own layer it lets a caller supply keys and values for positions it never ran, which is how
DFlash-type draft models and the adapter read verified context.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vllm_jetspecpp.models.attention import KeysValues, Rope, attend, rotate

FAMILIES = {"llama": False, "qwen3": True}
"""Supported ``model_type`` → whether queries and keys are normalised per head."""


@dataclass(frozen=True)
class LayerConfig:
    """Sizes of a decoder layer."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    qk_norm: bool
    attention_bias: bool = False
    mlp_bias: bool = False

    @classmethod
    def from_hf(cls, config: Any) -> LayerConfig:
        """Read the sizes of a Hugging Face config.

        Raises:
            ValueError: a family or variant that is not supported.
        """
        if config.model_type not in FAMILIES:
            raise ValueError(f"target family {config.model_type!r} is not supported; supported: {', '.join(FAMILIES)}")
        if config.hidden_act != "silu":
            raise ValueError(f"hidden_act must be 'silu', got {config.hidden_act!r}")
        if any(kind != "full_attention" for kind in getattr(config, "layer_types", None) or ()):
            raise ValueError("sliding-window layers are not supported; all layer_types must be 'full_attention'")
        return cls(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            rms_norm_eps=config.rms_norm_eps,
            qk_norm=FAMILIES[config.model_type],
            attention_bias=bool(config.attention_bias),
            mlp_bias=bool(getattr(config, "mlp_bias", False)),
        )


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``x`` [..., size], computed in float32 as the target does."""
        return self.weight * F.rms_norm(x.float(), self.weight.shape, eps=self.eps).to(x.dtype)


class Attention(nn.Module):
    """Self-attention of a layer; queries come from the block, keys from the block and from given segments."""

    def __init__(self, config: LayerConfig) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        bias = config.attention_bias
        self.q_proj = nn.Linear(config.hidden_size, width, bias=bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=bias)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()

    def _heads(self, x: Tensor, count: int) -> Tensor:
        return x.view(*x.shape[:2], count, self.head_dim)

    def keys_values(self, x: Tensor, rope: Rope) -> KeysValues:
        """Keys and values of ``x`` [batch, length, hidden], which is normalised already."""
        keys = self.k_norm(self._heads(self.k_proj(x), self.num_kv_heads)).transpose(1, 2)
        return KeysValues(rotate(keys, rope), self._heads(self.v_proj(x), self.num_kv_heads).transpose(1, 2))

    def forward(self, x: Tensor, rope: Rope, context: list[KeysValues], mask: Tensor) -> tuple[Tensor, KeysValues]:
        """See :meth:`TransformerLayer.forward`."""
        own = self.keys_values(x, rope)
        queries = rotate(self.q_norm(self._heads(self.q_proj(x), self.num_heads)).transpose(1, 2), rope)
        out = attend(queries, [*context, own], mask)
        return self.o_proj(out.transpose(1, 2).flatten(2)), own


class MLP(nn.Module):
    """Gated SiLU feed-forward."""

    def __init__(self, config: LayerConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] → [..., hidden]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class TransformerLayer(nn.Module):
    """Pre-norm decoder layer."""

    def __init__(self, config: LayerConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def keys_values(self, normed: Tensor, rope: Rope) -> KeysValues:
        """Keys and values of ``normed`` [batch, length, hidden], which is normalised already."""
        return self.self_attn.keys_values(normed, rope)

    def context_keys_values(self, states: Tensor, rope: Rope) -> KeysValues:
        """Keys and values as if ``states`` [batch, length, hidden] were this layer's input at those positions."""
        return self.self_attn.keys_values(self.input_layernorm(states), rope)

    def forward(self, x: Tensor, rope: Rope, context: list[KeysValues], mask: Tensor) -> tuple[Tensor, KeysValues]:
        """Run the layer on a block.

        Args:
            x: [batch, length, hidden].
            rope: of the block's positions.
            context: segments before the block's own keys.
            mask: [batch, length, num_keys] over the segments and, last, the block itself; see ``attention.attend``.

        Returns:
            The new states [batch, length, hidden] and the block's own keys and values.
        """
        attended, own = self.self_attn(self.input_layernorm(x), rope, context, mask)
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x)), own


class LayerStack(nn.ModuleList):
    """``count`` layers on top of each other."""

    def __init__(self, config: LayerConfig, count: int) -> None:
        super().__init__(TransformerLayer(config) for _ in range(count))

    def __iter__(self) -> Iterator[TransformerLayer]:
        return cast(Iterator[TransformerLayer], super().__iter__())
