"""Worker and model runner for a target on GPUs."""

from __future__ import annotations

from typing import Any

from vllm_jetspecpp.vllm_plugin import compat
from vllm_jetspecpp.vllm_plugin.hidden_states import HiddenStatesRunner
from vllm_jetspecpp.vllm_plugin.worker import SpecDecodeWorker


class GPUSpecDecodeWorker(SpecDecodeWorker):
    """vLLM's GPU worker with a draft process on a device of its own."""

    def init_device(self) -> None:
        """Check what the GPU worker needs of vLLM, then go on as every worker of ours."""
        compat.require("gpu")
        super().init_device()

    def _make_model_runner(self) -> Any:
        if self.use_v2_model_runner:
            from vllm_jetspecpp.vllm_plugin.model_runner_v2 import HiddenStatesRunnerV2

            return HiddenStatesRunnerV2(self.vllm_config, self.device)
        return HiddenStatesRunner(self.vllm_config, self.device)
