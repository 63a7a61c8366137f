"""DFlash, JetSpec, DSpark, Domino, any parallel draft model alone: one pass from true states, then Jacobi passes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_jetspecpp.evaluation.baselines.base import SequenceEngine
from vllm_jetspecpp.foresight.noise import noise_positions
from vllm_jetspecpp.models.attention import KeysValues, RotaryTable
from vllm_jetspecpp.models.logit_correction import Head
from vllm_jetspecpp.models.rival_checkpoint import RivalInfo, RivalParts, load_rival, read_rival
from vllm_jetspecpp.models.target_parts import load_target_config


@dataclass(frozen=True)
class Rival:
    """A parallel draft model in memory."""

    info: RivalInfo
    parts: RivalParts
    rotary: RotaryTable

    @classmethod
    def load(
        cls,
        checkpoint: Path,
        target: Path,
        max_positions: int,
        dtype: torch.dtype = torch.bfloat16,
        device: Any = "cpu",
    ) -> Rival:
        """Read a checkpoint, see :mod:`vllm_jetspecpp.models.rival_checkpoint`.

        Args:
            target: folder of the target.
            max_positions: positions of the rotary table.
        """
        hf_config = load_target_config(target)
        info = read_rival(checkpoint, hf_config)
        parts = load_rival(info, target, hf_config, dtype, device)
        return cls(info, parts, RotaryTable(hf_config, max_positions, dtype).to(device))


class ParallelEngine(SequenceEngine):
    """A parallel draft model on the critical path.

    Args:
        rival: the model.
        num_draft_tokens: γ; may exceed the length the model was trained for.
        jacobi_passes: J passes that read the last draft (Eq. 8), without context refresh.
    """

    def __init__(self, rival: Rival, num_draft_tokens: int, jacobi_passes: int = 0) -> None:
        super().__init__(num_draft_tokens)
        self.info, self.parts, self._rotary = rival.info, rival.parts, rival.rotary
        self.target_layer_ids = self.info.target_layer_ids
        self.jacobi_passes = jacobi_passes
        self._head = Head(lambda tokens: F.embedding(tokens, self.parts.embedding), self.parts.head_token_ids)
        self._context: list[KeysValues] = []

    def reset(self) -> None:
        """Forget the last request."""
        self._context = []

    def commit(self, start: int, states: Tensor) -> None:
        """Keys and values of true states, behind what is known before ``start``."""
        weight = self.parts.embedding
        positions = torch.arange(start, start + len(states), device=weight.device)[None]
        rope = self._rotary(positions)
        new = self.parts.draft_model.context_keys_values(states[None].to(weight), rope)
        if start == 0:
            self._context = new
        else:
            self._context = [
                KeysValues(*(torch.cat([a[:, :, :start], b], dim=2) for a, b in zip(old, own, strict=True)))
                for old, own in zip(self._context, new, strict=True)
            ]

    def _inputs(self, anchor: Tensor, count: int) -> Tensor:
        """Anchor, then mask or noise: [1, count] int64."""
        mask = self.info.mask_token_id
        if mask is None:
            at = noise_positions(torch.tensor(len(self.tokens) - 1), count - 1)
            unknown = torch.tensor(self.tokens)[at].to(anchor.device)
        else:
            unknown = torch.full((count - 1,), mask, device=anchor.device)
        return torch.cat([anchor, unknown]).unsqueeze(0)

    def _pass(self, inputs: Tensor) -> Tensor:
        """One forward: drafts [γ] int64 from block inputs [1, rows]."""
        model, start, count = self.parts.draft_model, len(self.tokens) - 1, inputs.shape[1]
        device = inputs.device
        rope = self._rotary(torch.arange(start, start + count, device=device)[None])
        own = torch.ones(count, count, dtype=torch.bool, device=device)
        mask = torch.cat([own.new_ones(count, start), own.tril() if self.info.causal else own], dim=1)[None]
        hidden = model(self._head.embed(inputs), rope, [[kv] for kv in self._context], mask)
        hidden = hidden[:, : self.num_draft_tokens] if self.info.shifted else hidden[:, 1:]
        logits = F.linear(hidden, self.parts.head)
        if model.correction is None:
            return self._head.token_ids[logits.max(-1).indices][0]
        return model.correction.draft(logits, hidden, inputs[:, 0], self._head)[0]

    def draft(self) -> tuple[int, ...]:
        """J_0 and J further passes."""
        anchor = torch.tensor(self.tokens[-1:], device=self.parts.embedding.device)
        inputs = self._inputs(anchor, self.num_draft_tokens + (0 if self.info.shifted else 1))
        drafts = self._pass(inputs)
        for _ in range(self.jacobi_passes):
            drafts = self._pass(torch.cat([anchor, drafts]).unsqueeze(0)[:, : inputs.shape[1]])
        return tuple(drafts.tolist())
