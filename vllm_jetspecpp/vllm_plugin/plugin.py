"""Entry point of group ``vllm.general_plugins``: lets vLLM accept ``method: jetspecpp``.

``register`` runs in every process of vLLM (API server, engine core, workers), so it is light, may run twice and never
raises. It wraps two functions of ``vllm.engine.arg_utils``; everything else is reached through the worker class that
:class:`~vllm_jetspecpp.vllm_plugin.config.JetSpecConfig` sets. A vLLM that runs another method runs its own code.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

METHOD = "jetspecpp"
# Below "vllm", so that vLLM's own logging configuration formats and filters it.
logger = logging.getLogger("vllm.jetspecpp")


def register() -> None:
    """Hook the method into vLLM's engine arguments; on failure log it and leave vLLM as it is."""
    try:
        from vllm.engine import arg_utils

        _accept_method(arg_utils.EngineArgs)
        _offer_choice(arg_utils)
    except Exception:
        logger.exception("speculative method %r is not available: this vLLM lacks its entry points", METHOD)


def _is_ours(function: Any) -> bool:
    """Whether a function of vLLM was wrapped by this module already."""
    return getattr(function, "__globals__", None) is globals()


def _accept_method(engine_args: Any) -> None:
    original = engine_args.create_speculative_config
    if _is_ours(original):
        return

    @functools.wraps(original)
    def create_speculative_config(self: Any, target_model_config: Any, target_parallel_config: Any) -> Any:
        from vllm_jetspecpp.vllm_plugin import environment

        environment.release()  # a former engine of this process may have used our method, the next one need not
        if _requested_method(self) != METHOD:
            return original(self, target_model_config, target_parallel_config)
        from vllm_jetspecpp.vllm_plugin.create_config import create_config

        return create_config(self, target_model_config, target_parallel_config)

    engine_args.create_speculative_config = create_speculative_config


def _requested_method(engine_args: Any) -> str | None:
    given = engine_args.speculative_config
    method = given.get("method") if isinstance(given, dict) else None
    return method or getattr(engine_args, "spec_method", None)


def _offer_choice(arg_utils: Any) -> None:
    """Let ``--spec-method jetspecpp`` through argparse."""
    original = arg_utils.get_kwargs
    if _is_ours(original):
        return

    @functools.wraps(original)
    def get_kwargs(cls: Any) -> dict[str, dict[str, Any]]:
        kwargs = original(cls)
        choices = kwargs.get("method", {}).get("choices") if cls.__name__ == "SpeculativeConfig" else None
        if isinstance(choices, list) and METHOD not in choices:
            choices.append(METHOD)
        return kwargs

    arg_utils.get_kwargs = get_kwargs
