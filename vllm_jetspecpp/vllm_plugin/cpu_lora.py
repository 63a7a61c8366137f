"""Repair of vLLM's LoRA kernels for the CPU.

A request without an adapter has index -1, which these kernels read as the last adapter (vLLM 0.32, with any method or
none): beside a request with an adapter, such a request is answered by an adapted target too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

NAMES = ("bgmv_shrink", "bgmv_expand", "bgmv_expand_slice")
"""All the others call these."""


def only_adapted_rows(kernel: Callable[..., None]) -> Callable[..., None]:
    """The kernel, adding nothing to rows of index -1."""

    @functools.wraps(kernel)
    def repaired(
        inputs: torch.Tensor,  # [num_rows, num_inputs]
        weights: torch.Tensor,
        outputs: torch.Tensor,
        indices: torch.Tensor,  # [num_rows]
        *options: Any,
        **named_options: Any,
    ) -> None:
        inputs = inputs.masked_fill((indices < 0).unsqueeze(1), 0)
        kernel(inputs, weights, outputs, indices, *options, **named_options)

    return repaired


def is_broken() -> bool:
    """Whether vLLM's kernel, as installed in this process, adapts a row that has no adapter."""
    from vllm.lora.punica_wrapper import punica_cpu

    outputs = torch.zeros(1, 1)
    punica_cpu.bgmv_expand(torch.ones(1, 1), torch.ones(1, 1, 1), outputs, torch.tensor([-1]))
    return bool(outputs.any())


def repair() -> bool:
    """Replace vLLM's kernels if they are broken.

    Returns:
        Whether a repair was needed.

    Raises:
        RuntimeError: they still are.
    """
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    if not is_broken():
        return False
    for name in NAMES:
        kernel = only_adapted_rows(getattr(lora_ops, name))
        for module in (lora_ops, punica_cpu):
            setattr(module, name, kernel)
    if is_broken():
        raise RuntimeError(
            "vLLM's LoRA kernels for the CPU adapt requests without an adapter and could not be replaced"
        )
    return True
