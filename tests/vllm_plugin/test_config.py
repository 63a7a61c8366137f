"""Options are checked before anything loads, with one line that says what was given and what is allowed."""

from __future__ import annotations

import json
import logging
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm.triton_utils
from safetensors.torch import load_file, save_file
from vllm.config import ParallelConfig
from vllm.config.speculative import SpeculativeConfig
from vllm.engine.arg_utils import EngineArgs

from tests.tiny_checkpoint import make_tiny_checkpoint
from tests.tiny_models import make_tiny_llama
from vllm_jetspecpp.vllm_plugin import environment, placement
from vllm_jetspecpp.vllm_plugin.config import CPU_WORKER, V2_RUNNER, JetSpecConfig

Create = Callable[..., Any]
OWN_ENGINE = {"draft_engine": "tests.engines.EchoEngine", "num_speculative_tokens": 7, "model": "anything"}


ELSEWHERE = {"transport": "tcp", "ray_address": "192.0.2.1:6379"}


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
def caplog_vllm(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """vLLM's loggers do not propagate."""
    logger = logging.getLogger("vllm.jetspecpp")
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)


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


def test_a_short_trained_length_becomes_a_window(
    create: Create, target: Path, tmp_path: Path, caplog_vllm: pytest.LogCaptureFixture
) -> None:
    """max_model_len is 256: a checkpoint made for 100 positions reads the last 100, and says so."""
    made_for = make_tiny_checkpoint(target, tmp_path, max_position_embeddings=100)
    config = create(method(model=str(made_for.folder)))
    assert config.draft_window == 100
    assert "made for 100 positions and max_model_len is 256: drafts are made from the last 100" in caplog_vllm.text
    assert create(method(model=str(made_for.folder), draft_window=60)).draft_window == 60


def test_vllm_drops_a_schedule_beside_data_parallelism(target: Path) -> None:
    """Its own rule, for every method."""
    options = method(**OWN_ENGINE, num_speculative_tokens_per_batch_size=[(1, 4, 3)])
    args = EngineArgs(model=str(target), skip_tokenizer_init=True, speculative_config=options, data_parallel_size=2)
    assert args.create_engine_config().speculative_config.num_speculative_tokens_per_batch_size is None
    environment.release()


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
        download_dir="/models",
        speculative_config=method(**OWN_ENGINE, draft_resources={"num_cpus": 1, "drafting": 1}),
    )
    vllm_config = args.create_engine_config()
    spec = vllm_config.speculative_config
    engine = spec.engine_config(vllm_config)
    assert (engine.target, engine.num_slots, engine.max_model_len) == (str(target), 3, 128)
    assert (engine.dtype, engine.device, engine.num_threads) == ("float32", "cpu", 1)
    assert (engine.prefix_store_bytes, engine.window) == (256 << 20, None)
    assert (engine.target_revision, engine.download_dir) == (None, "/models")
    assert spec.placement_config.draft_resources == {"num_cpus": 1, "drafting": 1}
    assert not vllm_config.scheduler_config.async_scheduling and not vllm_config.use_v2_model_runner


def test_draft_process_elsewhere_takes_no_core_of_this_host(create: Create, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cores are those of its node; Ray chooses its GPU; RAY_ADDRESS is as good as the option."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    config = create(method(**OWN_ENGINE, **ELSEWHERE, draft_resources={"num_cpus": 3, "far": 1}))
    assert config.draft_cores is None and placement.BIND not in os.environ
    assert config.placement_config.any_node and config.draft_device == "cpu" and config._num_threads == 3
    config = create(method(**OWN_ENGINE, **ELSEWHERE, draft_cores=[70, 71]))
    assert config.placement_config.draft_cores == (70, 71) and config._num_threads == 2
    config = create(method(**OWN_ENGINE, **ELSEWHERE, draft_resources={"num_gpus": 1}))
    assert config.draft_device == "cuda" and config.draft_cores is None
    for here in ({}, {"ray_address": "local"}):
        config = create(method(**OWN_ENGINE, transport="tcp", **here))
        assert not config.placement_config.any_node and config.draft_cores == [max(os.sched_getaffinity(0))]
    monkeypatch.setenv("RAY_ADDRESS", "192.0.2.1:6379")
    assert create(method(**OWN_ENGINE, transport="tcp")).placement_config.any_node
    assert not create(method(**OWN_ENGINE)).placement_config.any_node


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_outcome": 2}, "unknown option 'num_outcome' (did you mean 'num_outcomes'?); allowed: context_refreshes"),
        ({"metrics_directory": "/tmp"}, "unknown option 'metrics_directory'"),
        ({"parallel_drafting": True}, "'parallel_drafting' has no meaning for method 'jetspecpp'"),
        ({"prompt_lookup_max": 3}, "'prompt_lookup_max' has no meaning"),
        ({"rejection_sample_method": "synthetic"}, "'rejection_sample_method' has no meaning"),
        ({"num_outcomes": 0}, "num_outcomes must be an integer from 1 to 64, got 0"),
        ({"num_outcomes": "many"}, "num_outcomes must be an integer or 'auto', got 'many'"),
        ({"jacobi_passes": "aut"}, "jacobi_passes must be an integer or 'auto', got 'aut' (did you mean 'auto'?)"),
        ({"num_outcomes": 65, "jacobi_passes": "auto"}, "num_outcomes must be an integer from 1 to 64, got 65"),
        ({"context_refreshes": "auto", "jacobi_passes": 17}, "jacobi_passes must be an integer from 0 to 16, got 17"),
        ({"num_refined": 0}, "num_refined must be an integer from 1 to 64, got 0"),
        ({"num_refined": "al"}, "num_refined must be an integer or 'auto', got 'al'"),
        ({"copy_drafts": "perhaps"}, "copy_drafts: Input should be a valid boolean"),
        ({"min_accept_prob": "aut"}, "min_accept_prob must be a number or 'auto', got 'aut' (did you mean 'auto'?)"),
        ({"min_accept_prob": 1.0}, "min_accept_prob must be a number from 0 to below 1, got 1.0"),
        ({"min_accept_prob": -0.1}, "min_accept_prob must be a number from 0 to below 1, got -0.1"),
        ({"plan_profile": "plan.json"}, "plan_profile is for options that are 'auto', and none is"),
        ({"num_outcomes": "auto", "plan_profile": "/none"}, "plan_profile '/none' is not a file"),
        (
            {"num_outcomes": "auto", "jacobi_passes": 7},
            "acceptance statistics know J0-R0, J0-R1, J1-R1, J2-R2, J3-R3, and none with jacobi_passes 7",
        ),
        ({"jacobi_passes": 1, "context_refreshes": 3}, "context_refreshes must be at most jacobi_passes + 1"),
        (
            {"selection": "best"},
            "selection must be one of 'auto', 'calibrated', 'conformal', 'uncalibrated'",
        ),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens: Input should be greater than 0, got 0"),
        ({"num_speculative_tokens": 64}, "num_speculative_tokens must be an integer from 1 to 63, got 64"),
        (
            {"num_speculative_tokens_per_batch_size": [[2, 4, 1]]},
            "num_speculative_tokens_per_batch_size [(2, 4, 1)]: The first batch-size range must start at 1",
        ),
        ({"num_speculative_tokens_per_batch_size": [[1, 4, -1]]}, "values must be >= 0"),
        ({"transport": "pigeon"}, "transport must be one of 'shared_memory', 'tcp', 'local', got 'pigeon'"),
        ({"ray_address": "ray://head:10001"}, "ray_address must be the HOST:PORT of a cluster, or 'local', got 'ray:"),
        ({**ELSEWHERE, "draft_cores": 2}, "draft_cores must be distinct core ids of the node that draft_resources"),
        ({**ELSEWHERE, "draft_cores": [1, 1]}, "draft_cores must be distinct core ids of the node"),
        (
            {**ELSEWHERE, "draft_device": "cuda:1"},
            "draft_device must be 'auto', 'cpu' or 'cuda' for a draft process on",
        ),
        ({**ELSEWHERE, "draft_device": "cuda"}, "draft_device 'cuda' on any node needs draft_resources with num_gpus"),
        (
            {**ELSEWHERE, "draft_resources": {"num_gpus": 1}, "draft_cores": [0]},
            "draft_cores is for draft_device 'cpu', got draft_device 'cuda'",
        ),
        ({"draft_slots": 0}, "draft_slots must be an integer from 1 to 4096, got 0"),
        ({"prefix_store_mib": -1}, "prefix_store_mib must be an integer from 0 to"),
        ({"draft_window": 0}, "draft_window must be an integer from 1 to 256 (max_model_len), got 0"),
        ({"draft_window": 257}, "draft_window must be an integer from 1 to 256 (max_model_len), got 257"),
        ({"cache_bytes_per_position": 1}, "unknown option 'cache_bytes_per_position'"),
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


@pytest.mark.parametrize("name", ["pipeline_parallel_size", "prefill_context_parallel_size"])
def test_refused_parallelism(create: Create, name: str) -> None:
    check_refusal(lambda: create(method(**OWN_ENGINE), parallel={name: 2}), f"needs {name} 1, got 2")


def test_refused_context_parallelism_of_decoding(create: Create) -> None:
    parallel = {"tensor_parallel_size": 2, "decode_context_parallel_size": 2}
    check_refusal(
        lambda: create(method(**OWN_ENGINE), parallel=parallel), "needs decode_context_parallel_size 1, got 2"
    )


def test_several_workers_need_a_saved_profile(create: Create) -> None:
    """Measuring at start was not made to run with tensor parallelism."""
    planned = method(**OWN_ENGINE, num_outcomes="auto")
    message = "need plan_profile with several workers an engine"
    check_refusal(lambda: create(planned, parallel={"tensor_parallel_size": 2}), message)


def test_refused_data_parallelism_of_experts(
    create: Create, model_configs: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(model_configs["target"]), "is_moe", True)
    parallel = {"data_parallel_size": 2, "data_parallel_size_local": 2}
    check_refusal(
        lambda: create(method(**OWN_ENGINE), parallel=parallel), "needs data_parallel_size 1 for a mixture of experts"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"enable_expert_parallel": True}, "Number of experts in the model must be greater than 0"),
        ({"enable_sleep_mode": True}, "Sleep mode is not supported on current platform"),
    ],
)
def test_refused_by_vllm_itself(target: Path, options: dict[str, Any], message: str) -> None:
    """A dense target has no experts, and sleep mode needs a GPU."""
    args = EngineArgs(model=str(target), skip_tokenizer_init=True, speculative_config=method(**OWN_ENGINE), **options)
    with pytest.raises(ValueError, match=message):
        args.create_engine_config()
    environment.release()


def changed_copy(folder: Path, copy: Path, config: dict[str, Any], change: Callable[[dict[str, Any]], Any]) -> Path:
    """A target like that in ``folder`` with other entries in its config and other tensors."""
    shutil.copytree(folder, copy)
    values = json.loads((copy / "config.json").read_text()) | config
    (copy / "config.json").write_text(json.dumps(values))
    weights = load_file(copy / "model.safetensors")
    change(weights)
    save_file(weights, copy / "model.safetensors", {"format": "pt"})
    return copy


def to_int8(weights: dict[str, Any]) -> None:
    name = "model.layers.7.mlp.up_proj.weight"
    weights[name] = weights[name].to(torch.int8)


def pack(weights: dict[str, Any]) -> None:
    weights["model.layers.7.mlp.up_proj.qweight"] = weights.pop("model.layers.7.mlp.up_proj.weight").to(torch.int8)


@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        (
            {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}},
            pack,
            "can't read the weights of a quantized target (awq)",
        ),
        ({}, pack, "has no tensor 'model.layers.7.mlp.up_proj.weight', which the draft process needs"),
        ({}, to_int8, "is I8; it must be one of F64, F32, F16, BF16"),
        ({}, lambda weights: weights.pop("lm_head.weight"), "has no tensor 'lm_head.weight'"),
    ],
)
def test_refused_weights(
    target: Path,
    checkpoint: Path,
    tmp_path: Path,
    config: dict[str, Any],
    change: Callable[[dict[str, Any]], Any],
    message: str,
) -> None:
    """What the draft process could not cut out of the target's files; before anything loads."""
    changed = changed_copy(target, tmp_path / "target", config, change)
    options = method(model=str(checkpoint))
    args = EngineArgs(model=str(changed), skip_tokenizer_init=True, dtype="float16", speculative_config=options)
    check_refusal(args.create_engine_config, message)
    environment.release()


def test_refused_files(target: Path, checkpoint: Path, tmp_path: Path) -> None:
    """Weights of tensorizer, sharded_state, PyTorch's own and others are not in safetensors files under these names."""
    shutil.copytree(target, tmp_path / "target")
    (tmp_path / "target/model.safetensors").rename(tmp_path / "target/model.tensors")
    options = method(model=str(checkpoint))
    args = EngineArgs(model=str(tmp_path / "target"), skip_tokenizer_init=True, speculative_config=options)
    check_refusal(args.create_engine_config, "reads the target from safetensors files")
    environment.release()


def test_refused_sources_of_weights(
    create: Create, checkpoint: Path, model_configs: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = method(model=str(checkpoint))
    check_refusal(lambda: create(ours, load_format="dummy"), "load_format 'dummy' makes random ones")
    assert create(method(**OWN_ENGINE), load_format="dummy")  # an engine of the user's need not read the target
    config = model_configs["target"]
    monkeypatch.setattr(config, "model_weights", "s3://bucket/target")
    check_refusal(lambda: create(ours), "needs a target in a folder or on the hub, got 's3://bucket/target'")
    monkeypatch.setattr(config, "model_weights", "")
    from vllm_jetspecpp.vllm_plugin.target_checks import check_weights

    monkeypatch.setattr(config, "model", "owner/name")
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "True")
    check_refusal(lambda: check_weights(config, 5), "finds no target on ModelScope: give its folder, got 'owner/name'")


def test_each_engine_takes_its_share(create: Create, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after an engine core has made itself the only one, as vLLM's do for dense models."""
    monkeypatch.setattr(placement, "_usable_nodes", lambda: [[0, 1, 2, 3]])
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    parallel = {"data_parallel_size": 2, "data_parallel_size_local": 2}
    config = create(method(**OWN_ENGINE), parallel=parallel)
    assert config.draft_cores == [2, 3] and os.environ[placement.BIND] == "0|1"
    shares = []
    for rank in range(2):
        own = pickle.loads(pickle.dumps(config))
        own.target_parallel_config.data_parallel_rank_local = rank
        own.target_parallel_config.reconfigure_for_independent_dp_rank()
        shares.append((own.placement_config.draft_cores, own.engine_device))
    assert shares == [((2,), "cpu"), ((3,), "cpu")]


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


def test_choice_of_model_runner(create: Create, monkeypatch: pytest.MonkeyPatch) -> None:
    own = method(**OWN_ENGINE)
    monkeypatch.delenv(V2_RUNNER, raising=False)
    create(own)
    assert os.environ[V2_RUNNER] == "0"
    environment.release()
    monkeypatch.setenv(V2_RUNNER, "yes")
    check_refusal(lambda: create(own), "VLLM_USE_V2_MODEL_RUNNER must be 0 or 1, got 'yes'")
    monkeypatch.setenv(V2_RUNNER, "1")
    check_refusal(lambda: create(own), "VLLM_USE_V2_MODEL_RUNNER=1 needs Triton with a backend for this machine")
    monkeypatch.setattr(vllm.triton_utils, "HAS_TRITON", True)
    create(own)
    assert os.environ[V2_RUNNER] == "1"


@pytest.mark.usefixtures("create")  # gives the environment back
def test_vllm_does_not_choose_async_scheduling(model_configs: dict[str, Any]) -> None:
    args = EngineArgs(model=model_configs["target"].model, speculative_config=method(**OWN_ENGINE))
    assert args.async_scheduling is None
    args.create_speculative_config(model_configs["target"], ParallelConfig())
    assert args.async_scheduling is False


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


def test_child_processes_know_our_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several API servers configure the engine once more each, in the environment of the one that started them."""
    monkeypatch.delenv(placement.BIND, raising=False)
    environment.set_default(placement.BIND, "0|1")
    code = f"from vllm_jetspecpp.vllm_plugin import environment as e; print(e.given_by_user({placement.BIND!r}))"
    done = subprocess.run([sys.executable, "-c", code], env=os.environ, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "None"
    environment.release()
    assert placement.BIND not in os.environ and environment.OURS not in os.environ


def test_environment_is_given_back(create: Create, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(placement.BIND, raising=False)
    monkeypatch.setattr(placement, "_usable_nodes", lambda: [[0, 1, 2, 3]])
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    create(method(**OWN_ENGINE))
    assert os.environ[placement.BIND] == "0,1,2" and os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "0"
    create(None)
    assert placement.BIND not in os.environ and "VLLM_USE_V2_MODEL_RUNNER" not in os.environ
