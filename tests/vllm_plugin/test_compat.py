from __future__ import annotations

import json

import pytest
import vllm
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from vllm_jetspecpp.vllm_plugin import compat
from vllm_jetspecpp.vllm_plugin.doctor import doctor

NAME = "vllm.v1.worker.gpu_model_runner.GPUModelRunner"


def test_this_vllm_has_everything() -> None:
    assert compat.check(("config", "metrics", "worker", "cpu", "v2", "v2_cpu", "bench", "trace", "trace_v2")) == []


def test_symbols_of_the_v2_runner_are_asked_for_with_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    without = {"config", "metrics", "worker", "cpu"}
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    assert {symbol.scope for symbol in compat.needed_here()} == without
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    assert {symbol.scope for symbol in compat.needed_here()} == without | {"v2", "v2_cpu"}


def test_missing_symbol_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(GPUModelRunner, "take_draft_token_ids")
    assert compat.check(["worker"]) == [
        f"{NAME}.take_draft_token_ids is missing (needed to collect drafts [overridden])"
    ]
    compat.require("config")
    with pytest.raises(RuntimeError) as error:
        compat.require("worker")
    assert f"vLLM {vllm.__version__}: {NAME}.take_draft_token_ids is missing" in str(error.value)
    assert "it works with vLLM 0.32, 0.33" in str(error.value) and "\n" not in str(error.value)


def test_renamed_branch_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GPUModelRunner, "_get_eagle3_aux_layers_from_config", lambda self: None)
    assert compat.check(["worker"]) == [
        f"{NAME}._get_eagle3_aux_layers_from_config does not know 'eagle_aux_hidden_state_layer_ids' "
        "(needed to choose the tapped layers)"
    ]


def test_register_never_raises(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    from vllm.engine.arg_utils import EngineArgs

    from vllm_jetspecpp.vllm_plugin.plugin import register

    monkeypatch.delattr(EngineArgs, "create_speculative_config")
    register()


def test_doctor(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor() == 0
    assert "all found" in capsys.readouterr().out
    monkeypatch.delattr(GPUModelRunner, "take_draft_token_ids")
    assert doctor(json=True) == 1
    report = json.loads(capsys.readouterr().out)
    assert [symbol["name"] for symbol in report["symbols"] if symbol["problem"]] == [f"{NAME}.take_draft_token_ids"]
    assert report["packages"]["torch"] and report["machine"]["cores"]
