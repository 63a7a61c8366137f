"""From ``--speculative-config`` and the other engine arguments to a checked :class:`JetSpecConfig`."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError
from vllm.config.speculative import SpeculativeConfig

from vllm_jetspecpp.config import check_keys
from vllm_jetspecpp.vllm_plugin import compat, metrics
from vllm_jetspecpp.vllm_plugin.config import DEFAULT_ENGINE, OPTIONS, WHERE, JetSpecConfig
from vllm_jetspecpp.vllm_plugin.plugin import METHOD


def create_config(engine_args: Any, target_model_config: Any, target_parallel_config: Any) -> JetSpecConfig:
    """What ``EngineArgs.create_speculative_config`` returns for our method.

    Raises:
        ValueError: an option is unknown, out of range or does not fit the target; one line.
        RuntimeError: this vLLM lacks a symbol we need.
    """
    compat.require("config")
    options = _collect_options(engine_args)
    _check_names(options)
    _check_engine(engine_args, options)
    # Nor may vLLM choose async scheduling: drafts come over the host, after the last outcome.
    engine_args.async_scheduling = False
    try:
        spec = JetSpecConfig(
            **options, target_model_config=target_model_config, target_parallel_config=target_parallel_config
        )
    except ValidationError as error:
        raise ValueError(_one_line(error)) from None
    spec.metrics_directory = metrics.prepare(engine_args)
    return spec


def _check_engine(engine_args: Any, options: dict[str, Any]) -> None:
    """Refuse what vLLM could only refuse later: in the worker, or request by request."""
    if engine_args.async_scheduling:
        raise ValueError(f"method {METHOD!r} does not support async scheduling: remove --async-scheduling")
    if engine_args.load_format == "dummy" and options.get("draft_engine", DEFAULT_ENGINE) == DEFAULT_ENGINE:
        raise ValueError(f"method {METHOD!r} needs the target's own weights: load_format 'dummy' makes random ones")
    if engine_args.logits_processors:
        raise ValueError(
            f"method {METHOD!r} does not support logits processors of your own, as no speculative method of vLLM's "
            f"does: remove --logits-processors, got {engine_args.logits_processors}"
        )
    guided = engine_args.structured_outputs_config
    backend = guided.get("backend") if isinstance(guided, dict) else guided.backend
    if backend == "lm-format-enforcer":
        raise ValueError(
            f"structured outputs backend {backend!r} cannot take drafts back, which method {METHOD!r} needs; "
            "use 'auto', 'xgrammar', 'guidance' or 'outlines'"
        )


def _collect_options(engine_args: Any) -> dict[str, Any]:
    """Options of ``--speculative-config`` and of the ``--spec-*`` flags, which must not repeat each other."""
    options = {key.replace("-", "_"): value for key, value in (engine_args.speculative_config or {}).items()}
    for flag, key in (("spec_method", "method"), ("spec_model", "model"), ("spec_tokens", "num_speculative_tokens")):
        value = getattr(engine_args, flag, None)
        if value is None:
            continue
        if key in options:
            raise ValueError(f"--{flag.replace('_', '-')} and --speculative-config[{key!r}] are mutually exclusive")
        options[key] = value
    return {key: value for key, value in options.items() if value is not None}


def _check_names(options: dict[str, Any]) -> None:
    for name in options:
        if name not in OPTIONS and name in SpeculativeConfig.__dataclass_fields__:
            raise ValueError(f"{WHERE}: option {name!r} has no meaning for method {METHOD!r}; remove it")
    check_keys(options, OPTIONS, WHERE)


def _one_line(error: ValidationError) -> str:
    """Pydantic's first complaint without its frame; our own messages come through as they are."""
    first = error.errors()[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, ValueError):
        return str(cause)
    return f"{WHERE}: {'.'.join(map(str, first['loc']))}: {first['msg']}, got {first['input']!r}"
