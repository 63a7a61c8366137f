"""Requests with LoRA adapters: the adapted target's own output, drafts or not, beside requests without one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.engines import SwitchableEngine
from tests.tiny_models import SIZES, make_tiny_llama
from tests.vllm_plugin.conftest import local_drafts, running_engine

RANK = 8
ADAPTERS = ("", "first", "second")
"""The first without one."""
OPTIONS: dict[str, Any] = {
    "enable_lora": True,
    "max_loras": 2,
    "max_lora_rank": RANK,
    "max_num_batched_tokens": 64,
    "enable_prefix_caching": True,
}
MAX_TOKENS = 40
WIDTH = SIZES["head_dim"] * SIZES["num_attention_heads"]
SHAPES = {
    "self_attn.q_proj": (SIZES["hidden_size"], WIDTH),
    "self_attn.v_proj": (SIZES["hidden_size"], SIZES["head_dim"] * SIZES["num_key_value_heads"]),
    "self_attn.o_proj": (WIDTH, SIZES["hidden_size"]),
    "mlp.gate_proj": (SIZES["hidden_size"], SIZES["intermediate_size"]),
    "mlp.down_proj": (SIZES["intermediate_size"], SIZES["hidden_size"]),
}
"""Inputs and outputs of the adapted projections."""
Answers = dict[str, list[list[int]]]


def make_adapter(folder: Path, seed: int) -> Path:
    """A random adapter in PEFT's format, strong enough to change most tokens."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(SIZES["num_hidden_layers"]):
        for name, (inputs, outputs) in SHAPES.items():
            prefix = f"base_model.model.model.layers.{layer}.{name}"
            weights[f"{prefix}.lora_A.weight"] = torch.randn(RANK, inputs, generator=generator) * 0.3
            weights[f"{prefix}.lora_B.weight"] = torch.randn(outputs, RANK, generator=generator) * 0.3
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors")
    modules = [name.split(".")[1] for name in SHAPES]
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": modules, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {name: make_adapter(folder / name, seed) for seed, name in enumerate(ADAPTERS) if name}


def ask(llm: Any, prompts: list[list[int]], adapters: dict[str, Path], names: tuple[str, ...]) -> Answers:
    """Greedy answers of all adapters, in one batch."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True, detokenize=False)
    requests = [
        LoRARequest(name, ADAPTERS.index(name), str(adapters[name])) if name else None
        for _ in prompts
        for name in names
    ]
    asked = [{"prompt_token_ids": prompt} for prompt in prompts for _ in names]
    outputs = llm.generate(asked, params, lora_request=requests, use_tqdm=False)
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    return {name: tokens[i :: len(names)] for i, name in enumerate(names)}


@pytest.fixture(scope="module")
def some_prompts(prompts: list[list[int]]) -> list[list[int]]:
    return prompts[:4]


@pytest.fixture(scope="module")
def plain_answers(model: Path, adapters: dict[str, Path], some_prompts: list[list[int]]) -> Answers:
    """One adapter at a time, the target's own answer first: plain vLLM mixes them up on CPU."""
    with running_engine(model, **OPTIONS) as llm:
        return {name: ask(llm, some_prompts, adapters, (name,))[name] for name in ADAPTERS}


def test_adapters_change_the_output(plain_answers: Answers) -> None:
    for first, second, third in zip(*plain_answers.values(), strict=True):
        assert first != second != third != first


@pytest.fixture(scope="module", params=["known", "real"])
def drafts(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def llm(drafts: str, model: Path, plain_answers: Answers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    engine = None if drafts == "real" else "SwitchableEngine"
    options = local_drafts(model, tmp_path_factory.mktemp(drafts), engine)
    with running_engine(model, speculative_config=options, **OPTIONS) as llm:
        yield llm


@pytest.mark.parametrize("names", [("first",), ADAPTERS], ids=["alone", "two_adapters_and_none_together"])
def test_greedy(
    names: tuple[str, ...],
    drafts: str,
    llm: Any,
    plain_answers: Answers,
    adapters: dict[str, Path],
    some_prompts: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Requests with an adapter are drafted for too."""
    expected = {name: plain_answers[name] for name in names}
    num_tokens = sum(len(answer) for answers in expected.values() for answer in answers)
    for mode in ("real",) if drafts == "real" else ("echo", "mixed"):
        if mode != "real":
            known = [p + a for answers in expected.values() for p, a in zip(some_prompts, answers, strict=True)]
            monkeypatch.setattr(SwitchableEngine, "mode", mode)
            monkeypatch.setattr(SwitchableEngine.last, "sequences", known)
        llm.collective_rpc("jetspecpp_stats", kwargs={"reset": True})
        assert ask(llm, some_prompts, adapters, names) == expected
        stats = llm.collective_rpc("jetspecpp_stats")[0]
        assert sum(stats["committed"].values()) == num_tokens and stats["invalid_blocks"] == 0
        assert stats["drafted"] > num_tokens / 2
        if mode == "echo" and names == ("first",):
            assert stats["accepted"] == stats["drafted"]


def test_kernels_leave_other_requests_alone(llm: Any) -> None:
    """The engine has repaired them where needed, and knows."""
    from vllm.lora.punica_wrapper import punica_cpu

    from vllm_jetspecpp.vllm_plugin import cpu_lora

    assert not cpu_lora.is_broken() and not cpu_lora.repair()
    outputs = torch.zeros(3, 2)
    indices, inputs = torch.tensor([0, -1, 1]), torch.ones(3, 2)
    punica_cpu.bgmv_shrink(inputs, torch.stack([torch.eye(2), 2 * torch.eye(2)]), outputs, indices, 1.0)
    assert outputs.tolist() == [[1, 1], [0, 0], [2, 2]]
