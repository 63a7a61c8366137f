"""Prefix caching: vLLM brings no states for cached positions, and drafts are as good as the first time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.demo_model import CHECKPOINT, TARGET, require_demo_model
from tests.tiny_checkpoint import make_tiny_checkpoint
from tests.tiny_models import make_tiny_llama
from tests.vllm_plugin.conftest import generate, running_engine, worker_of

BLOCK = 32
TOKENS = 24


def tokens(count: int, seed: int) -> list[int]:
    return torch.randint(128, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


INSTRUCTION = (
    "You are a patient teacher of mathematics. Read the question twice, name what is asked for, then calculate step by "
    "step, one line for each step, and give the units with every number. Check the result by calculating backwards. If "
    "something is missing in the question, say so and make a sensible assumption. Close with one short sentence that "
    "starts with the words 'The answer is' and holds the number alone, so that a reader finds it at once."
)
QUESTIONS = (
    "A baker sells 12 loaves an hour. How many loaves are sold in a day of 8 hours?",
    "A train travels 60 miles an hour for two and a half hours. How far does it go?",
    "Tom has 3 boxes of 24 pencils and gives 10 away. How many are left?",
    "A shirt costs 20 dollars and is reduced by a quarter. What is the new price?",
)
LONG = tokens(150, 1)
PROMPTS = {
    "repeated": [LONG],
    "shared": [LONG[:100] + tokens(20, 2)],
    "short": [tokens(5, 3), tokens(32, 4), tokens(33, 5)],
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def plain_outputs(target: Path) -> dict[str, list[list[int]]]:
    with running_engine(target) as plain:
        return {name: generate(plain, prompts, max_tokens=TOKENS) for name, prompts in PROMPTS.items()}


@pytest.fixture(scope="module")
def llm(
    target: Path, plain_outputs: dict[str, list[list[int]]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    """The real draft engine, two slots, and a small prefix store; after the plain engine has ended."""
    checkpoint = make_tiny_checkpoint(target, tmp_path_factory.mktemp("checkpoint"), copy_adapter=True)
    options = {"method": "jetspecpp", "model": str(checkpoint.folder), "transport": "local", "draft_slots": 2}
    with running_engine(
        target,
        max_num_batched_tokens=64,
        enable_prefix_caching=True,
        block_size=BLOCK,
        speculative_config=options | {"prefix_store_mib": 1},
    ) as llm:
        yield llm


def take_stats(llm: Any) -> dict[str, Any]:
    return llm.collective_rpc("jetspecpp_stats", kwargs={"reset": True})[0]


def run(llm: Any, prompts: list[list[int]]) -> tuple[list[list[int]], dict[str, Any]]:
    take_stats(llm)
    return generate(llm, prompts, max_tokens=TOKENS), take_stats(llm)


def prefixes_of(llm: Any) -> Any:
    return worker_of(llm).draft_client._end._engine.prefixes


def same(stats: dict[str, Any]) -> dict[str, Any]:
    names = ("rounds", "accepted", "accepted_lengths", "blocks_by_origin", "missing_positions")
    return {name: stats[name] for name in names}


@pytest.mark.parametrize("name", PROMPTS)
def test_acceptance_with_a_warm_cache_is_that_with_a_cold_one(
    llm: Any, plain_outputs: dict[str, list[list[int]]], name: str
) -> None:
    """Round for round the same, not only within some percent; and the tokens are plain vLLM's."""
    assert llm.reset_prefix_cache()
    cold_outputs, cold = run(llm, PROMPTS[name])
    warm_outputs, warm = run(llm, PROMPTS[name])
    assert cold_outputs == warm_outputs == plain_outputs[name]
    assert same(warm) == same(cold) and warm["missing_positions"] == 0
    assert warm["context_positions"] > 0


def test_cached_positions_really_came_without_states(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """And without the store they are missing, are counted, and the output is the same."""
    llm.reset_prefix_cache()
    outputs, _ = run(llm, [LONG])
    monkeypatch.setattr(prefixes_of(llm).store, "restore", lambda *_: [])
    again, stats = run(llm, [LONG])
    assert again == outputs
    cached = len(LONG) // BLOCK * BLOCK
    assert stats["missing_positions"] == cached * sum(stats["blocks_by_origin"].values())
    assert 0 < stats["missing_share"] < 1


def test_a_conversation(llm: Any) -> None:
    """Each turn repeats the former ones with their answers; every cached position has its states."""
    llm.reset_prefix_cache()
    conversation = tokens(40, 7)
    for turn in range(5):
        (answer,), stats = run(llm, [conversation])
        assert stats["missing_positions"] == 0, turn
        conversation += answer + tokens(9, 8 + turn)


def test_requests_without_a_slot_leave_no_states_behind(
    llm: Any, plain_outputs: dict[str, list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six requests for two slots; then their prompts again. What vLLM cached for the slotless ones is missing."""
    llm.reset_prefix_cache()
    prompts = [tokens(40, 20 + i) for i in range(6)]
    outputs, _ = run(llm, prompts)
    again, stats = run(llm, prompts)
    assert again == outputs and stats["missing_positions"] == 0  # the same two begin first
    alone = [run(llm, [prompt]) for prompt in prompts]
    assert [output for (output,), _ in alone] == outputs
    missing = [stats["missing_positions"] > 0 for _, stats in alone]
    assert missing == [False, False, True, True, True, True]


def test_cache_salt_and_small_store(llm: Any) -> None:
    """Another salt is another prefix to vLLM, so to us; and the store keeps within its memory."""
    from vllm import SamplingParams

    llm.reset_prefix_cache()
    store = prefixes_of(llm).store
    assert 0 < store.num_bytes <= 1 << 20
    outputs = []
    for salt in ("one", "two", "one"):
        take_stats(llm)
        params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
        (output,) = llm.generate([{"prompt_token_ids": LONG, "cache_salt": salt}], params, use_tqdm=False)
        outputs.append(list(output.outputs[0].token_ids))
        assert take_stats(llm)["missing_positions"] == 0
    assert outputs[0] == outputs[1] == outputs[2]
    for seed in range(30, 60):
        generate(llm, [tokens(100, seed)], max_tokens=2)
    assert len(store) <= store.capacity


def test_the_shipped_checkpoint_with_a_warm_cache() -> None:
    """SmolLM2 in float32, real questions behind a long instruction: acceptance warm within 2 % of cold."""
    from transformers import AutoTokenizer

    require_demo_model()
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "system", "content": INSTRUCTION}, {"role": "user", "content": question}],
            add_generation_prompt=True,
            return_dict=False,
        )
        for question in QUESTIONS
    ]
    options = {"method": "jetspecpp", "model": str(CHECKPOINT), "num_speculative_tokens": 7, "transport": "local"}
    with running_engine(
        TARGET, enable_prefix_caching=True, block_size=BLOCK, max_model_len=512, speculative_config=options
    ) as llm:
        cold_outputs, cold = run(llm, prompts)
        warm_outputs, warm = run(llm, prompts)
    assert warm_outputs == cold_outputs and min(map(len, prompts)) > 3 * BLOCK
    print(f"acceptance length {cold['acceptance_length']:.3f} cold, {warm['acceptance_length']:.3f} warm")
    assert cold["acceptance_length"] > 1.5 and warm["missing_positions"] == 0
    assert warm["acceptance_length"] == pytest.approx(cold["acceptance_length"], rel=0.02)
