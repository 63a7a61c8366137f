"""Options are checked before anything is loaded, and the core imports without vLLM and Ray."""

from __future__ import annotations

import subprocess
import sys

import pytest

from vllm_jetspecpp.config import EngineConfig, RoundConfig, check_keys, from_dict, resolve_class


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_draft_tokens": 0}, "num_speculative_tokens must be an integer from 1 to 63, got 0"),
        ({"num_draft_tokens": 7, "num_outcomes": 0}, "num_outcomes must be an integer from 1 to 64, got 0"),
        ({"num_draft_tokens": 7, "num_outcomes": True}, "num_outcomes must be an integer"),
        ({"num_draft_tokens": 7, "jacobi_passes": -1}, "jacobi_passes must be an integer from 0 to 16, got -1"),
        (
            {"num_draft_tokens": 7, "jacobi_passes": 1, "context_refreshes": 3},
            "context_refreshes must be at most jacobi_passes . 1",
        ),
        ({"num_draft_tokens": 7, "fallback_refreshes": 2}, "fallback_refreshes must be at most fallback_passes . 1"),
        ({"num_draft_tokens": 7, "selection": "uncalibrate"}, "did you mean 'uncalibrated'"),
        ({"num_draft_tokens": 7, "num_outcome": 3}, "unknown option 'num_outcome' .did you mean 'num_outcomes'"),
    ],
)
def test_bad_values_are_refused_in_one_line(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        from_dict(RoundConfig, values, "speculative_config")
    assert "\n" not in str(error.value)


def test_engine_config_checks_dtype_and_slots() -> None:
    with pytest.raises(ValueError, match="dtype must be one of"):
        EngineConfig("t", "c", RoundConfig(7), 1, 128, dtype="int8")
    with pytest.raises(ValueError, match="num_slots"):
        EngineConfig("t", "c", RoundConfig(7), 0, 128)


def test_engine_class_is_resolved_or_named() -> None:
    assert resolve_class("vllm_jetspecpp.config.RoundConfig", "draft_engine") is RoundConfig
    with pytest.raises(ValueError, match=r"draft_engine: no class at 'nowhere\.Engine'"):
        resolve_class("nowhere.Engine", "draft_engine")


def test_unknown_key_without_neighbour_lists_what_is_allowed() -> None:
    with pytest.raises(ValueError, match="allowed: alpha, beta"):
        check_keys(["zzz"], ["beta", "alpha"], "here")


CORE = [
    "foresight.foresight",
    "runtime.draft_engine",
    "runtime.offline",
    "draft_process.loop",
    "transport.shared_memory",
    "transport.tcp",
]


def test_core_needs_neither_vllm_nor_ray() -> None:
    """The method runs where vLLM and Ray cannot be imported."""
    imports = "; ".join(f"import vllm_jetspecpp.{name}" for name in CORE)
    code = f"import sys; sys.modules['vllm'] = sys.modules['ray'] = None; {imports}"
    subprocess.run([sys.executable, "-c", code], check=True)
