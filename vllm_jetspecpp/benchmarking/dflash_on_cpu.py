"""vLLM's built-in ``dflash`` as it is meant, on a CPU: a rival is measured at its best.

vLLM hands its RMSNorm kernel the key norms of all draft layers as one matrix. The CPU's kernel (0.32) takes the first
row for all layers: nothing fails, but a trained draft model is accepted less (docs/benchmarking.md).
"""

from __future__ import annotations

from typing import Any

import torch


def repair() -> None:
    """Let every layer's context keys have that layer's norm, in this process, for engines that are made later."""
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        DFlashQwen3Model._normalize_context_k = normalise_context_keys


def normalise_context_keys(
    self: Any,
    all_k: torch.Tensor,  # [num_layers, num_positions, num_kv_heads, head_dim], contiguous
) -> torch.Tensor:
    """The kernel layer by layer; same shape."""
    from vllm import _custom_ops

    normed = torch.empty_like(all_k)
    for out, keys, weight in zip(normed, all_k, self._k_norm_weights, strict=True):
        _custom_ops.rms_norm(out, keys, weight, self._rms_norm_eps)
    return normed
