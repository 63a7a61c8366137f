"""Which targets the method serves, found out before anything of them is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm_jetspecpp.vllm_plugin.plugin import METHOD


def check_target(model: Any, parallel: Any) -> None:
    """Check kind and parallelism of a target.

    Args:
        model: vLLM's ``ModelConfig``.
        parallel: its ``ParallelConfig``.

    Raises:
        ValueError: what is not supported, and what was given; one line.
    """
    if model.is_multimodal_model:
        raise ValueError(f"method {METHOD!r} does not support multimodal targets, got {model.model}")
    # Stages of a pipeline hold few of the tapped layers each; context parallel workers few of the positions.
    for name in ("pipeline_parallel_size", "prefill_context_parallel_size", "decode_context_parallel_size"):
        if getattr(parallel, name) > 1:
            raise ValueError(f"method {METHOD!r} needs {name} 1, got {getattr(parallel, name)}")
    if parallel.data_parallel_size > 1 and model.is_moe:
        given = parallel.data_parallel_size
        raise ValueError(f"method {METHOD!r} needs data_parallel_size 1 for a mixture of experts, got {given}")


def check_weights(target: Any, deepest_tap: int) -> None:
    """Check, where that is possible before they load, that the draft process can read its parts of the target.

    Raises:
        ValueError: they are quantized, or not in safetensors files that it can find.
    """
    from vllm import envs

    from vllm_jetspecpp.models.target_parts import check_target_weights

    if target.model_weights:
        raise ValueError(f"method {METHOD!r} needs a target in a folder or on the hub, got {target.model_weights!r}")
    if Path(target.model).is_dir():
        check_target_weights(Path(target.model), deepest_tap, target.hf_config)
    elif envs.VLLM_USE_MODELSCOPE:
        raise ValueError(f"method {METHOD!r} finds no target on ModelScope: give its folder, got {target.model!r}")
