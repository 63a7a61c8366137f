"""Options are checked before anything loads, with one line that says what was given and what is allowed."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.config import ParallelConfig
from vllm.config.speculative import SpeculativeConfig
from vllm.engine.arg_utils import EngineArgs

from tests.tiny_checkpoint import make_tiny_checkpoint
from tests.tiny_models import make_tiny_llama
from vllm_jetspecpp.vllm_plugin import environment, placement
from vllm_jetspecpp.vllm_plugin.config import CPU_WORKER, JetSpecConfig

Create = Callable[..., Any]
OWN_ENGINE = {"draft_engine": "tests.engines.EchoEngine", "num_speculative_tokens": 7, "model": "anything"}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def other_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("other"), hidden_size=96, num_attention_heads=3)


@pytest.fixture(scope="module")
def checkpoint(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(target, tmp_path_factory.mktemp("checkpoint"), taps=(1, 3, 5), block_size=8).folder


@pytest.fixture(scope="module")
def model_configs(target: Path, other_target: Path) -> dict[str, Any]:
    options = {"skip_tokenizer_init": True, "dtype": "float32", "max_model_len": 256}
    return {
        name: EngineArgs(model=str(path), **options).create_model_config()
        for name, path in (("target", target), ("other", other_target))
    }


@pytest.fixture
def create(model_configs: dict[str, Any]) -> Iterator[Create]:
    """``EngineArgs.create_speculative_config``, as vLLM calls it."""

    def create(
        options: dict[str, Any],
        *,
        target: str = "target",
        parallel: dict[str, Any] | None = None,
        **engine_args: Any,
    ) -> Any:
        args = EngineArgs(model=model_configs[target].model, speculative_config=options, **engine_args)
        return args.create_speculative_config(model_configs[target], ParallelConfig(**parallel or {}))

    yield create
    environment.release()


def method(**options: Any) -> dict[str, Any]:
    return {"method": "jetspecpp", **options}


def test_defaults_come_from_the_checkpoint(create: Create, checkpoint: Path) -> None:
    config = create(method(model=str(checkpoint)))
    assert type(config) is JetSpecConfig and config.method == "jetspecpp"
    assert config.num_speculative_tokens == 7 and config.target_layer_ids == [1, 3, 5]
    assert config.round_config.block_size == 8 and config.round_config.num_outcomes == 4
    assert config.draft_device == "cpu" and config.draft_cores == [max(os.sched_getaffinity(0))]
    assert config.target_parallel_config.worker_cls == CPU_WORKER
    assert config.draft_model_config.hf_config.eagle_aux_hidden_state_layer_ids == [2, 4, 6]
    assert not hasattr(config.target_model_config.hf_config, "eagle_aux_hidden_state_layer_ids")
    assert "num_speculative_tokens=7" in repr(config)


def test_survives_pickling_and_replace(create: Create, checkpoint: Path) -> None:
    from vllm.config.utils import replace

    config = create(method(model=str(checkpoint), num_outcomes=2))
    for copied in (pickle.loads(pickle.dumps(config)), replace(config, num_outcomes=3)):
        assert type(copied) is JetSpecConfig and copied.target_layer_ids == [1, 3, 5]
        assert copied.draft_cores == config.draft_cores
    assert replace(config, num_outcomes=3).compute_hash() == config.compute_hash()


def test_hash_follows_the_tapped_layers(create: Create) -> None:
    first, second = (create(method(**OWN_ENGINE, target_layer_ids=ids)) for ids in ([1, 2], [1, 3]))
    assert first.compute_hash() != second.compute_hash()


def test_own_engine_taps_evenly_spaced_layers(create: Create) -> None:
    assert create(method(**OWN_ENGINE)).target_layer_ids == [1, 2, 3, 4, 5]


def test_engine_config(target: Path) -> None:
    args = EngineArgs(
        model=str(target),
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=128,
        max_num_seqs=3,
        speculative_config=method(**OWN_ENGINE, draft_resources={"num_cpus": 1, "drafting": 1}),
    )
    vllm_config = args.create_engine_config()
    spec = vllm_config.speculative_config
    engine = spec.engine_config(vllm_config)
    assert (engine.target, engine.num_slots, engine.max_model_len) == (str(target), 3, 128)
    assert (engine.dtype, engine.device, engine.num_threads) == ("float32", "cpu", 1)
    assert spec.placement_config.draft_resources == {"num_cpus": 1, "drafting": 1}
    assert not vllm_config.scheduler_config.async_scheduling and not vllm_config.use_v2_model_runner


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_outcome": 2}, "unknown option 'num_outcome' (did you mean 'num_outcomes'?); allowed: context_refreshes"),
        ({"parallel_drafting": True}, "'parallel_drafting' has no meaning for method 'jetspecpp'"),
        ({"prompt_lookup_max": 3}, "'prompt_lookup_max' has no meaning"),
        ({"rejection_sample_method": "synthetic"}, "'rejection_sample_method' has no meaning"),
        ({"num_outcomes": 0}, "num_outcomes must be an integer from 1 to 64, got 0"),
        ({"num_outcomes": "many"}, "num_outcomes: Input should be a valid integer, unable to parse"),
        ({"jacobi_passes": 1, "context_refreshes": 2}, "context_refreshes must be at most jacobi_passes"),
        (
            {"selection": "best"},
            "selection must be one of 'auto', 'calibrated', 'conformal', 'uncalibrated'",
        ),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens: Input should be greater than 0, got 0"),
        ({"num_speculative_tokens": 64}, "num_speculative_tokens must be an integer from 1 to 63, got 64"),
        ({"transport": "pigeon"}, "transport must be one of 'shared_memory', 'local', got 'pigeon'"),
        ({"draft_slots": 0}, "draft_slots must be an integer from 1 to 4096, got 0"),
        ({"reply_timeout": 0}, "reply_timeout must be a positive number of seconds, got 0"),
        ({"start_timeout": -1}, "start_timeout must be a positive number of seconds, got -1"),
        ({"draft_device": "tpu"}, "draft_device must be 'auto', 'cpu' or 'cuda:N', got 'tpu'"),
        ({"draft_device": "cuda:0"}, "draft_device 'cuda:0' does not exist: 0 CUDA device(s) found"),
        ({"draft_cores": 99}, "draft_cores must be an integer from 1 to"),
        ({"draft_cores": [0, 0]}, "draft_cores must be distinct cores of"),
        ({"draft_cores": [4095]}, "draft_cores must be distinct cores of"),
        ({"draft_resources": {"num_cpus": -1}}, "draft_resources: num_cpus must be a number from 0 on, got -1"),
        ({"draft_engine": "no.such.Engine"}, "draft_engine: no class at 'no.such.Engine'"),
        ({"draft_engine": "tests.engines.NoEngine"}, "draft_engine: no class at 'tests.engines.NoEngine'"),
        ({"target_layer_ids": [3, 1]}, "target_layer_ids must rise strictly within 0..7, got [3, 1]"),
        ({"target_layer_ids": [1, 8]}, "target_layer_ids must rise strictly within 0..7, got [1, 8]"),
        ({"num_speculative_tokens": None}, "num_speculative_tokens is required with a draft_engine of your own"),
    ],
)
def test_refused_options(create: Create, options: dict[str, Any], message: str) -> None:
    check_refusal(lambda: create(method(**(OWN_ENGINE | options))), message)


def check_refusal(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError) as refusal:
        call()
    assert message in str(refusal.value) and "\n" not in str(refusal.value)


def test_refused_checkpoints(create: Create, checkpoint: Path, tmp_path: Path) -> None:
    check_refusal(lambda: create(method()), "'model' is missing: the folder of a JetSpec++ checkpoint")
    check_refusal(lambda: create(method(model="/no/where")), "model '/no/where' is not a folder")
    check_refusal(lambda: create(method(model=str(tmp_path))), "manifest.json is missing")
    check_refusal(
        lambda: create(method(model=str(checkpoint)), target="other"), "this checkpoint is for another target"
    )
    too_many = method(model=str(checkpoint), num_speculative_tokens=8)
    check_refusal(lambda: create(too_many), f"from 1 to 7 (block_size of {checkpoint} less the anchor), got 8")
    other_layers = method(model=str(checkpoint), target_layer_ids=[1, 2])
    check_refusal(lambda: create(other_layers), "target_layer_ids come from the checkpoint, [1, 3, 5]; got [1, 2]")
    conformal = method(model=str(checkpoint), selection="conformal")
    check_refusal(lambda: create(conformal), "selection 'conformal' needs calibration/thresholds.json")


@pytest.mark.parametrize("name", ["pipeline_parallel_size", "data_parallel_size"])
def test_refused_parallelism(create: Create, name: str) -> None:
    check_refusal(lambda: create(method(**OWN_ENGINE), parallel={name: 2}), f"needs {name} 1, got 2")


def test_refused_targets_and_engines(
    create: Create, model_configs: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = method(**OWN_ENGINE)
    check_refusal(lambda: create(own, parallel={"worker_cls": "my.Worker"}), "'my.Worker' conflicts with it")
    check_refusal(lambda: create(own, async_scheduling=True), "does not support async scheduling")
    check_refusal(lambda: create(own, logits_processors=["my.Processor"]), "remove --logits-processors, got ['my.")
    enforcer = {"backend": "lm-format-enforcer"}
    check_refusal(lambda: create(own, structured_outputs_config=enforcer), "'lm-format-enforcer' cannot take drafts")
    monkeypatch.setattr(model_configs["target"], "max_model_len", 7)
    check_refusal(lambda: create(own), "num_speculative_tokens must be less than max_model_len 7, got 7")
    monkeypatch.setattr(model_configs["target"], "multimodal_config", object())
    check_refusal(lambda: create(own), "does not support multimodal targets")
    monkeypatch.undo()
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    check_refusal(lambda: create(own), "needs vLLM's V1 model runner: unset VLLM_USE_V2_MODEL_RUNNER, got '1'")


def test_flags(create: Create, checkpoint: Path) -> None:
    config = create(None, spec_method="jetspecpp", spec_model=str(checkpoint), spec_tokens=3)
    assert type(config) is JetSpecConfig and config.num_speculative_tokens == 3
    twice = method(model=str(checkpoint))
    check_refusal(lambda: create(twice, spec_model="x"), "--spec-model and --speculative-config['model']")


def test_choice_of_spec_method() -> None:
    from vllm.engine.arg_utils import get_kwargs

    from vllm_jetspecpp.vllm_plugin.plugin import register

    register()
    register()
    assert get_kwargs(SpeculativeConfig)["method"]["choices"].count("jetspecpp") == 1


def test_other_methods_are_vllms_own(create: Create) -> None:
    ngram = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
    assert type(create(ngram)) is SpeculativeConfig
    assert create(None) is None


def test_environment_is_given_back(create: Create, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(placement.BIND, raising=False)
    monkeypatch.setattr(placement, "_usable_cores", lambda: [0, 1, 2, 3])
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    create(method(**OWN_ENGINE))
    assert os.environ[placement.BIND] == "0,1,2" and os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "0"
    create(None)
    assert placement.BIND not in os.environ and "VLLM_USE_V2_MODEL_RUNNER" not in os.environ
