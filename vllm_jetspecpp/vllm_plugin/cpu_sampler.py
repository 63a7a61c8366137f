"""A right ``expand_kernel`` for vLLM's CPU sampler.

Without triton-cpu, vLLM 0.32 and 0.33 expand temperature, top-k and top-p into a temporary copy, whatever the
speculative method (vLLM issue 55005): the sampler then divides by uninitialised memory. We detect that by calling the
kernel and replace it through vLLM's own registry of kernel overrides.
"""

from __future__ import annotations

import torch

KERNEL = "vllm.v1.sample.rejection_sampler.expand_kernel"


def expand(
    output_ptr: torch.Tensor,  # [num_tokens]
    input_ptr: torch.Tensor,  # [num_requests], the output's dtype
    cu_num_tokens_ptr: torch.Tensor,  # [num_requests], integers: tokens up to and including each request
    replace_from: float,
    replace_to: float,
    MAX_NUM_TOKENS: int | None = None,
) -> None:
    """Repeat each request's value for each of its tokens, writing ``replace_to`` for ``replace_from``.

    With input [a, b] and cumulated counts [2, 5] the output is [a, a, b, b, b].
    """
    cumulated = cu_num_tokens_ptr.to(torch.int64)
    counts = torch.diff(cumulated, prepend=cumulated.new_zeros(1))
    values = torch.where(input_ptr == replace_from, torch.full_like(input_ptr, replace_to), input_ptr)
    output_ptr.copy_(torch.repeat_interleave(values, counts, output_size=output_ptr.shape[0]))


def is_broken() -> bool:
    """Whether vLLM's expansion, as installed in this process, gives a wrong answer."""
    from vllm.v1.sample.rejection_sampler import expand_batch_to_tokens

    expanded = expand_batch_to_tokens(torch.tensor([0.5, 0.25]), torch.tensor([1, 3], dtype=torch.int32), 3)
    return expanded.tolist() != [0.5, 0.25, 0.25]


def repair() -> bool:
    """Install our kernel if vLLM's is broken.

    Returns:
        Whether a repair was needed.

    Raises:
        RuntimeError: it is broken and our override does not take effect.
    """
    from vllm.triton_utils.dispatcher import register_kernels

    if not is_broken():
        return False
    register_kernels({KERNEL: expand})
    if is_broken():
        raise RuntimeError(f"vLLM's {KERNEL} gives wrong sampling parameters and could not be replaced")
    return True
