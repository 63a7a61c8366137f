"""What both trainers start from: the target's pieces, the shortlist of the vocabulary, sizes of the new networks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vllm_jetspecpp.models.attention import Rope
from vllm_jetspecpp.models.checkpoint import CheckpointInfo
from vllm_jetspecpp.models.target_layers import LayerConfig
from vllm_jetspecpp.models.target_parts import (
    TargetParts,
    TargetWeights,
    load_target_config,
    load_target_parts,
    resolve_folder,
)
from vllm_jetspecpp.training.target_states import Sequences


def default_taps(num_layers: int, count: int = 5) -> list[int]:
    """``count`` tapped layers spaced evenly over 1..L-3 (Qwen3-8B: 1, 9, 17, 25, 33 of 36)."""
    last = num_layers - 3
    return sorted({1 + round(i * (last - 1) / (count - 1)) for i in range(count)})


def shortlist(sequences: Sequences, size: int, vocab_size: int) -> Tensor:
    """The ``size`` tokens most frequent in the answers, ascending, [size] int64; all of them when ``size`` is 0.

    A draft can only name these; the target is not restricted, so a token outside is a rejection, never an error.
    """
    if not size:
        return torch.arange(vocab_size)
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for s in range(len(sequences)):
        answer = sequences.tokens[sequences.offsets[s] + sequences.prompt_lengths[s] : sequences.offsets[s + 1]]
        counts += torch.bincount(answer.long(), minlength=vocab_size)
    ids = counts.argsort(descending=True, stable=True)[:size].sort().values
    print(f"shortlist of {size} tokens covers {counts[ids].sum() / counts.sum():.4f} of the answers", flush=True)
    return ids


@dataclass(frozen=True)
class Setup:
    """The frozen surroundings of a training run."""

    hf_config: Any
    layer_config: LayerConfig
    weights: TargetWeights
    parts: TargetParts
    info: CheckpointInfo
    train: list[int]
    held_out: list[int]
    device: torch.device
    dtype: torch.dtype
    """Of the target's pieces."""

    def rope(self, positions: Tensor) -> Rope:
        """Rotary values of ``positions`` [N, ...], flattened to [N, length] and clamped to the table."""
        rotary = self.parts.rotary
        return rotary(positions.flatten(1).clamp(max=len(rotary.cos) - 1))

    @torch.no_grad()
    def target_logits(self, final: Tensor) -> Tensor:
        """The target's logits over the shortened head from its final states [..., hidden]."""
        return self.parts.logits(final.to(self.dtype))


def prepare(
    target: str,
    sequences: Sequences,
    info: CheckpointInfo,
    head_token_ids: Tensor,
    held_out: int,
    device: torch.device,
    dtype: torch.dtype,
) -> Setup:
    """Load the target's pieces and set ``held_out`` sequences aside, the last ones.

    Raises:
        ValueError: no sequence would be left to train on.
    """
    count = len(sequences)
    if count <= held_out:
        raise ValueError(f"{count} sequences are too few: {held_out} are held out for validation")
    folder = resolve_folder(target)
    hf_config = load_target_config(folder)
    longest = int(sequences.offsets.diff().max()) + info.block_size
    return Setup(
        hf_config=hf_config,
        layer_config=LayerConfig.from_hf(hf_config),
        weights=TargetWeights(folder),
        parts=load_target_parts(folder, info.deepest_tap, head_token_ids, longest, dtype, device),
        info=info,
        train=list(range(count - held_out)),
        held_out=list(range(count - held_out, count)),
        device=device,
        dtype=dtype,
    )
