"""The causal parallel draft model (Eq. 1), in the DFlash / JetSpec checkpoint format.

Tapped target states are concatenated, brought to hidden size by ``fc``, normalised once, and every layer makes keys
and values of them; queries come from the block alone. Position i reads its input token y_i and outputs the
distribution of y_i itself, so that one pass predicts the whole block and feeding a draft back is a Jacobi iteration.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from vllm_jetspecpp.models.attention import KeysValues, Rope
from vllm_jetspecpp.models.logit_correction import LogitCorrection
from vllm_jetspecpp.models.target_layers import LayerConfig, LayerStack, RMSNorm


class DraftModel(nn.Module):
    """Parallel draft model without embedding and LM head, which are the target's."""

    def __init__(
        self, config: LayerConfig, num_layers: int, num_taps: int, correction: LogitCorrection | None = None
    ) -> None:
        super().__init__()
        # The format's layers always normalise queries and keys, whatever the target's family does.
        layer_config = replace(config, qk_norm=True)
        self.fc = nn.Linear(num_taps * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = LayerStack(layer_config, num_layers)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.correction = correction
        """A rival's head; None in JetSpec++, DFlash and JetSpec."""
        self.packed_context: nn.Module | None = None
        """Makes the context's keys and values of all layers at once, where weights are packed."""

    def context_keys_values(self, states: Tensor, rope: Rope) -> list[KeysValues]:
        """One segment a layer from tapped states ``states`` [batch, length, num_taps * hidden], true or predicted."""
        fused = self.hidden_norm(self.fc(states.to(self.fc.weight.dtype)))
        if self.packed_context is not None:
            return self.packed_context(fused, rope)
        return [layer.keys_values(fused, rope) for layer in self.layers]

    def forward(self, embeddings: Tensor, rope: Rope, context: list[list[KeysValues]], mask: Tensor) -> Tensor:
        """One draft pass.

        Args:
            embeddings: [batch, length, hidden] of the block's input tokens (anchor, then noise or the current draft).
            context: for every layer, the segments before the block.
            mask: [batch, length, num_keys], see ``attention.attend``.

        Returns:
            [batch, length, hidden], normalised: ready for the LM head. Row i belongs to y_i; row 0, the anchor's, is
            unused.
        """
        x = embeddings
        for layer, segments in zip(self.layers, context, strict=True):
            x, _ = layer(x, rope, segments, mask)
        return self.norm(x)
