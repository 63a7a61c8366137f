"""vLLM's model runner V2 for a target on the CPU, with our speculator."""

from __future__ import annotations

from vllm.v1.worker.cpu.model_runner import CPUModelRunner

from vllm_jetspecpp.vllm_plugin.model_runner_v2 import HiddenStatesRunnerV2


class CPUHiddenStatesRunnerV2(HiddenStatesRunnerV2, CPUModelRunner):
    """For tests and for a vLLM with Triton's CPU backend: its kernels need one, or Triton's interpreter."""
