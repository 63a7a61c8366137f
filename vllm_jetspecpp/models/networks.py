"""The three networks of the draft process and the target's pieces, together."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_jetspecpp.config import EngineConfig
from vllm_jetspecpp.models.adapter import Adapter
from vllm_jetspecpp.models.checkpoint import CheckpointInfo, check_checkpoint, load_checkpoint
from vllm_jetspecpp.models.draft_model import DraftModel
from vllm_jetspecpp.models.target_layers import LayerConfig
from vllm_jetspecpp.models.target_parts import TargetParts, load_target_config, load_target_parts, resolve_folder


@dataclass
class Networks:
    """Draft model, adapter, decoder, and the target's embedding and (shortened) LM head."""

    draft_model: DraftModel
    adapter: Adapter
    target: TargetParts
    layer_config: LayerConfig
    num_taps: int
    token_rows: Tensor  # [vocab] int64, row of each token in the shortened head, -1 where it has none

    @classmethod
    def assemble(cls, draft_model: DraftModel, adapter: Adapter, target: TargetParts, config: LayerConfig) -> Networks:
        """Join networks that are loaded already."""
        rows = torch.full((target.embedding.shape[0],), -1, dtype=torch.int64, device=target.embedding.device)
        rows[target.head_token_ids] = torch.arange(len(target.head_token_ids), device=rows.device)
        num_taps = draft_model.fc.in_features // config.hidden_size
        return cls(draft_model, adapter, target, config, num_taps, rows)

    def deepest(self, states: Tensor) -> Tensor:
        """The deepest tapped layer's part of ``states`` [..., num_taps * hidden] → [..., hidden]."""
        return states.chunk(self.num_taps, dim=-1)[-1]

    def likeliest(self, hidden: Tensor) -> Tensor:
        """Most probable token of every row: [..., hidden] → [...] int64."""
        # max, not argmax: on a CPU in bfloat16 it is five times as fast.
        return self.target.head_token_ids[self.target.logits(hidden).max(-1).indices]

    def likeliest_with_log_prob(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """As :meth:`likeliest`, and the log of its probability, [...] float32."""
        logits = self.target.logits(hidden)
        best = logits.max(-1)
        return self.target.head_token_ids[best.indices], best.values.float() - logits.float().logsumexp(-1)


def load_networks(config: EngineConfig) -> tuple[Networks, CheckpointInfo]:
    """Load everything a draft process needs onto its device.

    Raises:
        ValueError: the checkpoint does not fit the target.
    """
    folder = resolve_folder(config.target, config.target_revision, config.download_dir)
    hf_config = load_target_config(folder)
    info = check_checkpoint(config.checkpoint, hf_config)
    dtype, layer_config = getattr(torch, config.dtype), LayerConfig.from_hf(hf_config)
    parts = load_checkpoint(info, layer_config, dtype, config.device)
    # A pre-drafted block starts up to a block past the end of the one under verification.
    max_positions = config.max_model_len + 2 * config.round.block_size
    target = load_target_parts(folder, info.deepest_tap, parts.head_token_ids, max_positions, dtype, config.device)
    return Networks.assemble(parts.draft_model, parts.adapter, target, layer_config), info
