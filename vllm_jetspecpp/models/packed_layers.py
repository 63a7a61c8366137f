"""The layers of the draft process's networks over packed weights: what :mod:`target_layers` does, for inference.

Activations are float32 between the products, keys and values of the networks' own dtype. Few operations and few copies:
at some tens of rows an operation costs as much to start as to run.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vllm_jetspecpp.models.attention import KeysValues, Rope, attend, rotate
from vllm_jetspecpp.models.packed_linear import PackedLinear
from vllm_jetspecpp.models.smoothing import SMALLEST, LargestInputs, smoothing
from vllm_jetspecpp.models.target_layers import RMSNorm, TransformerLayer


class FloatNorm(nn.Module):
    """A root-mean-square norm of float32 values; without weights where it copies a module that does nothing.

    Args:
        divisor: [size], what :mod:`smoothing` divides the input of the next product by.
    """

    def __init__(self, norm: nn.Module, divisor: Tensor | float = 1.0) -> None:
        super().__init__()
        self.weight = norm.weight.detach().float() / divisor if isinstance(norm, RMSNorm) else None
        self.eps = norm.eps if isinstance(norm, RMSNorm) else 0.0

    @cached_property
    def _scaled(self) -> tuple[Tensor, Tensor]:
        """Weights and √ε, for sums of squares instead of means."""
        assert self.weight is not None
        root = self.weight.shape[-1] ** 0.5
        return self.weight * root, torch.tensor(self.eps**0.5 * root)

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] → [..., size]. Four operations: PyTorch's own takes twice the time at a few rows."""
        if self.weight is None:
            return x
        x, (weight, floor) = x.float(), self._scaled
        length = torch.hypot(torch.linalg.vector_norm(x, dim=-1, keepdim=True), floor)
        return (x / length).mul_(weight)


class PackedLayer(nn.Module):
    """A :class:`TransformerLayer` over float32 states and packed weights.

    Args:
        inputs: what the layer's products have seen; smoothed accordingly.
    """

    def __init__(self, layer: TransformerLayer, inputs: LargestInputs) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self.num_heads, self.num_kv_heads, self.head_dim = (
            attention.num_heads,
            attention.num_kv_heads,
            attention.head_dim,
        )
        self.dtype = attention.q_proj.weight.dtype
        q, k, v, gate, up = attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj
        first = smoothing(inputs[q], q.weight, k.weight, v.weight)
        second = smoothing(inputs[gate], gate.weight, up.weight)
        third = smoothing(inputs[mlp.down_proj], mlp.down_proj.weight)
        self.norm = FloatNorm(layer.input_layernorm, first)
        self.second_norm = FloatNorm(layer.post_attention_layernorm, second)
        self.k_norm, self.qk_norm = FloatNorm(attention.k_norm), FloatNorm(attention.q_norm)
        if self.k_norm.weight is not None and self.qk_norm.weight is not None:
            norms = [self.qk_norm.weight] * self.num_heads + [self.k_norm.weight] * self.num_kv_heads
            self.qk_norm.weight = torch.stack(norms)  # [heads, head_dim]
        self.qkv, self.kv = PackedLinear.join(q, k, v, columns=first), PackedLinear.join(k, v, columns=first)
        self.out, self.down = PackedLinear.join(attention.o_proj), PackedLinear.join(mlp.down_proj, columns=third)
        # What divides the input of ``down`` divides the outputs of ``up``, which it is made of.
        self.gate_up = PackedLinear.join(gate, up, columns=second, rows=torch.cat([torch.ones_like(third), 1 / third]))

    def _rotated(self, rows: Tensor, norm: FloatNorm, rope: Rope) -> Tensor:
        """[batch, length, heads, head_dim] → [batch, heads, length, head_dim] of the networks' dtype."""
        return rotate(norm(rows).to(self.dtype).transpose(1, 2), rope)

    def context_keys_values(self, states: Tensor, rope: Rope) -> KeysValues:
        """See :class:`TransformerLayer`."""
        rows = self.kv(self.norm(states.float())).unflatten(-1, (2, self.num_kv_heads, self.head_dim))
        values = rows[..., 1, :, :].to(self.dtype).transpose(1, 2)
        return KeysValues(self._rotated(rows[..., 0, :, :], self.k_norm, rope), values)

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
    """Of one input that is normalised already: a draft model's.

    Args:
        columns: [hidden], what the norm has divided its output by.
    """

    def __init__(self, layers: Sequence[TransformerLayer], columns: Tensor | float = 1.0) -> None:
        super().__init__(layers)
        products = (product for layer in layers for product in (layer.self_attn.k_proj, layer.self_attn.v_proj))
        self.weights = PackedLinear.join(*products, columns=columns)

    def forward(self, normed: Tensor, rope: Rope) -> list[KeysValues]:
        """``normed`` [batch, length, hidden] → a segment a layer."""
        return self._by_layer(self.weights(normed), rope)


class PackedTaps(_JoinedContext):
    """Of the tapped states, each read by the layers of its own module: an adapter's."""

    def __init__(self, stacks: Sequence[Sequence[TransformerLayer]], inputs: LargestInputs) -> None:
        super().__init__([layer for stack in stacks for layer in stack])
        self.eps = stacks[0][0].input_layernorm.eps
        factors = [self._smoothing(stack, inputs) for stack in stacks]
        self.taps = nn.ModuleList(self._join(stack, factor) for stack, factor in zip(stacks, factors, strict=True))
        self.divisor = torch.stack(factors)  # [num_taps, hidden]

    @staticmethod
    def _smoothing(stack: Sequence[TransformerLayer], inputs: LargestInputs) -> Tensor:
        """Of the normalised states before any norm's weights: these become part of the products."""
        seen, weights = inputs[stack[0].self_attn.q_proj], []
        for layer in stack:
            norm, attention = layer.input_layernorm.weight.float(), layer.self_attn
            weights += [attention.k_proj.weight.float() * norm, attention.v_proj.weight.float() * norm]
        before = None if seen is None else seen / stack[0].input_layernorm.weight.float().abs().clamp(min=SMALLEST)
        return smoothing(before, *weights)

    @staticmethod
    def _join(stack: Sequence[TransformerLayer], factor: Tensor) -> PackedLinear:
        weights, biases = [], []
        for layer in stack:
            for product in (layer.self_attn.k_proj, layer.self_attn.v_proj):
                weights.append(product.weight.float() * layer.input_layernorm.weight.float() * factor)
                biases += [] if product.bias is None else [product.bias]
        return PackedLinear(weights, biases)

    def forward(self, states: Tensor, rope: Rope) -> list[KeysValues]:
        """``states`` [batch, length, num_taps * hidden] → a segment a layer, in running order."""
        rows = states.float().unflatten(-1, (len(self.taps), -1))
        rows = F.rms_norm(rows, rows.shape[-1:], eps=self.eps) / self.divisor
        products = [tap(x) for tap, x in zip(self.taps, rows.unbind(-2), strict=True)]
        return self._by_layer(torch.cat(products, dim=-1), rope)
