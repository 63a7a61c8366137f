"""The layers of the draft process's networks over packed weights: what :mod:`target_layers` does, for inference.

Activations are float32 between the products, keys and values of the networks' own dtype. Few operations and few copies:
at some tens of rows an operation costs as much to start as to run.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vllm_jetspecpp.models.attention import KeysValues, Rope, attend, rotate
from vllm_jetspecpp.models.packed_linear import PackedLinear
from vllm_jetspecpp.models.target_layers import RMSNorm, TransformerLayer


class FloatNorm(nn.Module):
    """A root-mean-square norm of float32 values; without weights where it copies a module that does nothing."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.weight = norm.weight.detach().float() if isinstance(norm, RMSNorm) else None
        self.eps = norm.eps if isinstance(norm, RMSNorm) else 0.0

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] → [..., size]."""
        if self.weight is None:
            return x
        if self.weight.ndim == 1:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return F.rms_norm(x, x.shape[-1:], eps=self.eps) * self.weight


class PackedLayer(nn.Module):
    """A :class:`TransformerLayer` with the same methods over float32 states and packed weights."""

    def __init__(self, layer: TransformerLayer) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self.num_heads, self.num_kv_heads, self.head_dim = (
            attention.num_heads,
            attention.num_kv_heads,
            attention.head_dim,
        )
        self.dtype = attention.q_proj.weight.dtype
        self.norm, self.second_norm = FloatNorm(layer.input_layernorm), FloatNorm(layer.post_attention_layernorm)
        self.k_norm, self.qk_norm = FloatNorm(attention.k_norm), FloatNorm(attention.q_norm)
        if self.k_norm.weight is not None and self.qk_norm.weight is not None:
            norms = [self.qk_norm.weight] * self.num_heads + [self.k_norm.weight] * self.num_kv_heads
            self.qk_norm.weight = torch.stack(norms)  # [heads, head_dim]
        self.qkv = PackedLinear.join(attention.q_proj, attention.k_proj, attention.v_proj)
        self.kv = PackedLinear.join(attention.k_proj, attention.v_proj)
        self.out, self.down = PackedLinear.join(attention.o_proj), PackedLinear.join(mlp.down_proj)
        self.gate_up = PackedLinear.join(mlp.gate_proj, mlp.up_proj)

    def _rotated(self, rows: Tensor, norm: FloatNorm, rope: Rope) -> Tensor:
        """[batch, length, heads, head_dim] → [batch, heads, length, head_dim] of the networks' dtype."""
        return rotate(norm(rows).to(self.dtype).transpose(1, 2), rope)

    def keys_values(self, normed: Tensor, rope: Rope) -> KeysValues:
        """See :class:`TransformerLayer`."""
        rows = self.kv(normed).unflatten(-1, (2, self.num_kv_heads, self.head_dim))
        values = rows[..., 1, :, :].to(self.dtype).transpose(1, 2)
        return KeysValues(self._rotated(rows[..., 0, :, :], self.k_norm, rope), values)

    def context_keys_values(self, states: Tensor, rope: Rope) -> KeysValues:
        """See :class:`TransformerLayer`."""
        return self.keys_values(self.norm(states.float()), rope)

    def forward(self, x: Tensor, rope: Rope, context: list[KeysValues], mask: Tensor) -> tuple[Tensor, KeysValues]:
        """See :class:`TransformerLayer`."""
        x = x.float()
        rows = self.qkv(self.norm(x)).unflatten(-1, (-1, self.head_dim))
        split = self.num_heads, self.num_kv_heads
        rotated = self._rotated(rows[..., : sum(split), :], self.qk_norm, rope)
        queries, keys = rotated.split(split, dim=1)
        own = KeysValues(keys, rows[..., sum(split) :, :].to(self.dtype).transpose(1, 2))
        attended = attend(queries, [*context, own], mask)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.second_norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate).mul_(up)), own


class _JoinedContext(nn.Module):
    """Keys and values of a context in all layers of a network, rotated in one go."""

    def __init__(self, layers: Sequence[TransformerLayer]) -> None:
        super().__init__()
        attentions = [layer.self_attn for layer in layers]
        self.num_kv_heads, self.head_dim = attentions[0].num_kv_heads, attentions[0].head_dim
        self.dtype = attentions[0].k_proj.weight.dtype
        self.k_norm = FloatNorm(attentions[0].k_norm)
        norms = [w for a in attentions if (w := FloatNorm(a.k_norm).weight) is not None]
        if norms:
            self.k_norm.weight = torch.stack(norms)[:, None]  # [layers, 1, head_dim]

    def _by_layer(self, rows: Tensor, rope: Rope) -> list[KeysValues]:
        """Products [batch, length, layers * 2 * heads * head_dim], a layer's keys before its values → segments."""
        keys, values = rows.unflatten(-1, (-1, 2, self.num_kv_heads, self.head_dim)).unbind(-3)
        keys = rotate(self.k_norm(keys).to(self.dtype).flatten(2, 3).transpose(1, 2), rope)
        values = values.to(self.dtype).flatten(2, 3).transpose(1, 2)
        by_layer = (x.split(self.num_kv_heads, dim=1) for x in (keys, values))
        return [KeysValues(*pair) for pair in zip(*by_layer, strict=True)]


class PackedContext(_JoinedContext):
    """Of one input that is normalised already: a draft model's."""

    def __init__(self, layers: Sequence[TransformerLayer]) -> None:
        super().__init__(layers)
        self.weights = PackedLinear.join(
            *(product for layer in layers for product in (layer.self_attn.k_proj, layer.self_attn.v_proj))
        )

    def forward(self, normed: Tensor, rope: Rope) -> list[KeysValues]:
        """``normed`` [batch, length, hidden] → a segment a layer."""
        return self._by_layer(self.weights(normed), rope)


class PackedTaps(_JoinedContext):
    """Of the tapped states, each read by the layers of its own module: an adapter's."""

    def __init__(self, stacks: Sequence[Sequence[TransformerLayer]]) -> None:
        super().__init__([layer for stack in stacks for layer in stack])
        self.eps = stacks[0][0].input_layernorm.eps
        self.taps = nn.ModuleList(PackedLinear(*self._after_norm(stack)) for stack in stacks)

    @staticmethod
    def _after_norm(stack: Sequence[TransformerLayer]) -> tuple[list[Tensor], list[Tensor]]:
        """Weights and biases of a module's keys and values; a norm's weights are those of the columns it feeds."""
        pairs = [
            (product.weight.float() * layer.input_layernorm.weight.float(), product.bias)
            for layer in stack
            for product in (layer.self_attn.k_proj, layer.self_attn.v_proj)
        ]
        return [weight for weight, _ in pairs], [bias for _, bias in pairs if bias is not None]

    def forward(self, states: Tensor, rope: Rope) -> list[KeysValues]:
        """``states`` [batch, length, num_taps * hidden] → a segment a layer, in running order."""
        rows = states.float().unflatten(-1, (len(self.taps), -1))
        rows = F.rms_norm(rows, rows.shape[-1:], eps=self.eps)
        products = [tap(x) for tap, x in zip(self.taps, rows.unbind(-2), strict=True)]
        return self._by_layer(torch.cat(products, dim=-1), rope)
