"""The decoder: the target's own layers above the deepest tapped one, its final norm and its LM head, all frozen.

Run over true states it gives the target's next-token distribution; run over the adapter's predictions, the estimate
p̂(· | j) from which outcomes are scored.
"""

from __future__ import annotations

from torch import Tensor, nn

from vllm_jetspecpp.models.attention import KeysValues, Rope
from vllm_jetspecpp.models.target_layers import LayerConfig, LayerStack, RMSNorm


class Decoder(nn.Module):
    """Target layers ``deepest tap + 1 .. L - 1`` and the final norm. The LM head is shared: the caller applies it."""

    def __init__(self, config: LayerConfig, num_layers: int) -> None:
        super().__init__()
        self.layers = LayerStack(config, num_layers)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, states: Tensor, rope: Rope, context: list[list[KeysValues]], mask: Tensor
    ) -> tuple[Tensor, list[KeysValues]]:
        """Continue the target from its deepest tapped layer.

        Args:
            states: [batch, length, hidden], outputs of the deepest tapped layer, true or predicted.
            context: for every layer, the segments before the block.
            mask: [batch, length, num_keys] bool.

        Returns:
            Normalised states [batch, length, hidden] for the LM head, and each layer's keys and values of the block.
        """
        own = []
        for layer, segments in zip(self.layers, context, strict=True):
            states, keys_values = layer(states, rope, segments, mask)
            own.append(keys_values)
        return self.norm(states), own
