"""The hidden-to-hidden adapter (Eq. 5): the target's states of a block, before the target has computed them.

One module per tapped layer ℓ, a short stack of layers copied from the target. A module reads the verified (or
predicted) states of its *own* layer ℓ at the positions before the block, and inside the block what the module below
predicts; the lowest reads token embeddings. All positions of all branches run in one pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor, nn

from vllm_jetspecpp.models.attention import KeysValues, Rope
from vllm_jetspecpp.models.target_layers import LayerConfig, LayerStack


class Adapter(nn.Module):
    """Modules A_ℓ for ascending tapped layers ℓ."""

    def __init__(self, config: LayerConfig, layers_per_module: list[int]) -> None:
        super().__init__()
        self.stacks = nn.ModuleList(LayerStack(config, count) for count in layers_per_module)
        self.packed_context: nn.Module | None = None
        """Makes the context's keys and values of all layers at once, where weights are packed."""

    def __iter__(self) -> Iterator[LayerStack]:
        return cast(Iterator[LayerStack], iter(self.stacks))

    @property
    def num_layers(self) -> int:
        """Layers of all modules together."""
        return sum(len(stack) for stack in self)

    def context_keys_values(self, states: Tensor, rope: Rope) -> list[KeysValues]:
        """One segment a layer, in running order, from tapped states ``states`` [batch, length, num_taps * hidden]."""
        if self.packed_context is not None:
            return self.packed_context(states, rope)
        taps = states.chunk(len(self.stacks), dim=-1)
        return [layer.context_keys_values(tap, rope) for stack, tap in zip(self, taps, strict=True) for layer in stack]

    def forward(self, embeddings: Tensor, rope: Rope, context: list[list[KeysValues]], mask: Tensor) -> Tensor:
        """Predict the tapped states of a block.

        Args:
            embeddings: [batch, length, hidden] of the block's tokens.
            context: for every layer in running order, the segments before the block.
            mask: [batch, length, num_keys] bool, causal inside a branch.

        Returns:
            [batch, length, num_taps * hidden], tapped layers ascending.
        """
        x, predicted, segments = embeddings, [], iter(context)
        for stack in self:
            for layer in stack:
                x, _ = layer(x, rope, next(segments), mask)
            predicted.append(x)
        return torch.cat(predicted, dim=-1)
