"""Fine-tune a copy of the decoder on the adapter's predictions (the paper's CE-trained decoder, Appendix B.3).

The method serves the untouched layers of the target; this is what they are compared with.
"""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from vllm_jetspecpp.models.decoder import Decoder
from vllm_jetspecpp.training.blocks import BlockBatch
from vllm_jetspecpp.training.config import AdapterConfig, DecoderConfig
from vllm_jetspecpp.training.losses import DISTANCES, masked_mean
from vllm_jetspecpp.training.setup import Setup
from vllm_jetspecpp.training.target_states import StateSource
from vllm_jetspecpp.training.train_adapter import AdapterObjective


class DecoderObjective(nn.Module):
    """A decoder over a trained adapter's predictions.

    Args:
        setup: the frozen surroundings.
        source: the training sequences and their states.
        config: the distance; the paper's is cross-entropy to the target's greedy token.
        adapter: trained weights.
    """

    def __init__(self, setup: Setup, source: StateSource, config: DecoderConfig, adapter: Path) -> None:
        super().__init__()
        if not adapter.is_file():
            raise FileNotFoundError(f"{adapter} is missing: train the adapter before a decoder over its predictions")
        self.setup, self.config, self.progress = setup, config, 0.0
        frozen = AdapterObjective(setup, source, AdapterConfig(initialise="random"))
        frozen.model.load_state_dict(load_file(adapter))
        frozen.requires_grad_(False).eval()
        self._adapter = (frozen,)  # in a tuple, so that its networks are none of ours
        self.model: Decoder = deepcopy(setup.parts.decoder).float().requires_grad_(True)
        if config.initialise not in ("target", "random"):
            self.model.load_state_dict(load_file(config.initialise))

    def make(self, batch: BlockBatch, gen: torch.Generator) -> BlockBatch:
        """Nothing here is random."""
        return batch.to(self.setup.device)

    def forward(self, batch: BlockBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Mean distance of the decoder's output to the target's."""
        (adapter,) = self._adapter
        _, logits = adapter.predict(batch, self.model)
        target = self.setup.target_logits(batch.final)
        return masked_mean(DISTANCES[self.config.loss](target, logits), batch.inside), {}

    def validate(self) -> dict[str, float]:
        """Top-1 agreement with the target, and KL to it."""
        (adapter,) = self._adapter
        return adapter.validate(self.model)
