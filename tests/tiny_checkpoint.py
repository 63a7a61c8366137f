"""Checkpoints with random weights for tiny targets: nothing they draft is likely right, so every path is walked."""

from __future__ import annotations

from pathlib import Path

import torch

from vllm_jetspecpp.models.checkpoint import CheckpointInfo, DraftParts, build, save_checkpoint
from vllm_jetspecpp.models.target_layers import LayerConfig
from vllm_jetspecpp.models.target_parts import TargetWeights, copy_layer, load_target_config


def make_tiny_checkpoint(
    target: Path,
    folder: Path,
    *,
    taps: tuple[int, ...] = (1, 3, 5),
    block_size: int = 8,
    draft_vocab_size: int | None = None,
    copy_adapter: bool = False,
    max_position_embeddings: int | None = None,
    seed: int = 0,
) -> CheckpointInfo:
    """Write a checkpoint for ``target``.

    ``copy_adapter`` gives every module the target's own layers between the taps: then only the keys over the verified
    context differ from the target's, and the decoder foresees much of what the target does.
    """
    hf_config = load_target_config(target)
    below = (-1, *taps[:-1])
    layers = tuple(tap - low if copy_adapter else 1 for tap, low in zip(taps, below, strict=True))
    vocab, positions = draft_vocab_size or hf_config.vocab_size, hf_config.max_position_embeddings
    info = CheckpointInfo(folder, taps, block_size, 2, layers, vocab, max_position_embeddings or positions)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        draft_model, adapter = build(LayerConfig.from_hf(hf_config), info)
        token_ids = torch.randperm(hf_config.vocab_size)[: info.draft_vocab_size].sort().values
    if copy_adapter:
        weights, source = TargetWeights(target), 0
        for stack in adapter.stacks:
            for layer in stack:
                copy_layer(weights, source, layer)
                source += 1
    parts = DraftParts(draft_model, adapter, token_ids)
    save_checkpoint(info, hf_config, parts, dtype=torch.float32, training={"made_by": "tests"}, target_name="tiny")
    return info
