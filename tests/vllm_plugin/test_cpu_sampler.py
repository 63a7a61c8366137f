from __future__ import annotations

import pytest
import torch

import vllm_jetspecpp.vllm_plugin.cpu_worker  # noqa: F401  vLLM's CPU workers replace parts of PyTorch first
from vllm_jetspecpp.vllm_plugin import cpu_sampler


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.int64])
def test_expand(dtype: torch.dtype) -> None:
    output = torch.full((6,), 9, dtype=dtype)
    cu_num_tokens = torch.tensor([2, 2, 5, 6], dtype=torch.int32)
    cpu_sampler.expand(output, torch.tensor([3, 4, 0, 7], dtype=dtype), cu_num_tokens, 0, 1)
    assert output.tolist() == [3, 3, 1, 1, 1, 7]


def test_broken_kernel_is_found_and_replaced() -> None:
    from vllm.triton_utils.dispatcher import register_kernels
    from vllm.utils import cpu_triton_utils
    from vllm.v1.sample.rejection_sampler import expand_batch_to_tokens

    register_kernels({cpu_sampler.KERNEL: cpu_triton_utils._expand_kernel_impl})
    broken = cpu_sampler.is_broken()
    assert cpu_sampler.repair() == broken
    assert not cpu_sampler.is_broken() and not cpu_sampler.repair()
    temperatures = expand_batch_to_tokens(torch.tensor([0.7, 0.0]), torch.tensor([3, 4]), 4, 0, 1)
    assert temperatures.tolist() == pytest.approx([0.7, 0.7, 0.7, 1.0])


def test_a_kernel_that_writes_elsewhere_counts_as_broken() -> None:
    from vllm.triton_utils.dispatcher import register_kernels

    register_kernels({cpu_sampler.KERNEL: lambda output, *_: output.clone().fill_(0)})
    assert cpu_sampler.is_broken()
    assert cpu_sampler.repair()
