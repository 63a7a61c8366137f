"""Requests come, go, wait and end at any time: greedy output equals plain vLLM's, and nobody reads another's states."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engines import SwitchableEngine
from tests.tiny_checkpoint import make_tiny_checkpoint
from tests.tiny_models import make_tiny_llama
from tests.vllm_plugin.conftest import ENGINE_OPTIONS, MAX_TOKENS, generate, running_engine, worker_of

MAX_MODEL_LEN = ENGINE_OPTIONS["max_model_len"]
NEAR_THE_END = range(MAX_MODEL_LEN - 10, MAX_MODEL_LEN)
"""Lengths of prompts that leave 1 to 10 tokens."""
NUM_SLOTS = 4
SMALL: dict[str, Any] = {"max_num_batched_tokens": 64, "block_size": 32, "num_gpu_blocks_override": 12}
"""Prefill in chunks, and room for one long request or a few short ones."""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def many_prompts(prompts: list[list[int]]) -> list[list[int]]:
    """The common ones, one of every length near the end, and twelve short ones."""
    generator = torch.Generator().manual_seed(2)
    lengths = (*NEAR_THE_END, *range(4, 16))
    return prompts + [torch.randint(128, (n,), generator=generator).tolist() for n in lengths]


@pytest.fixture(scope="module")
def expected(target: Path, many_prompts: list[list[int]]) -> list[list[int]]:
    """What plain vLLM says to each prompt."""
    with running_engine(target) as llm:
        return generate(llm, many_prompts)


@pytest.fixture(scope="module")
def known(many_prompts: list[list[int]], expected: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the echo engine drafts from."""
    path = tmp_path_factory.mktemp("known") / "sequences.json"
    path.write_text(json.dumps([p + o for p, o in zip(many_prompts, expected, strict=True)]))
    return path


def echo(known: Path, gamma: int = 7, **options: Any) -> dict[str, Any]:
    return {
        "method": "jetspecpp",
        "model": str(known),
        "draft_engine": "tests.engines.SwitchableEngine",
        "transport": "local",
        "num_speculative_tokens": gamma,
        **options,
    }


@pytest.fixture(scope="module")
def llm(target: Path, known: Path) -> Iterator[Any]:
    with running_engine(target, **SMALL, speculative_config=echo(known, draft_slots=NUM_SLOTS)) as llm:
        yield llm


class Front:
    """``LLMEngine`` by hand: requests are added and aborted between steps."""

    def __init__(self, llm: Any) -> None:
        self.engine = llm.llm_engine
        self.outputs: dict[str, list[int]] = {}
        self.finished: set[str] = set()

    def add(self, name: str, prompt: list[int], max_tokens: int = MAX_TOKENS) -> None:
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        self.engine.add_request(name, {"prompt_token_ids": prompt}, params)

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            for output in self.engine.step():
                self.outputs[output.request_id] = list(output.outputs[0].token_ids)
                if output.finished:
                    self.finished.add(output.request_id)

    def drain(self) -> None:
        while self.engine.has_unfinished_requests():
            self.step()


def take_stats(llm: Any) -> dict[str, Any]:
    return llm.collective_rpc("jetspecpp_stats", kwargs={"reset": True})[0]


def check_no_slot_is_lost(llm: Any) -> None:
    """After the last request only: a step more tells the runner which requests ended."""
    generate(llm, [[1, 2]], max_tokens=1)
    proposer = worker_of(llm).model_runner.drafter
    assert len(proposer._states) <= 1 and not proposer._without_slot
    assert len(proposer._free_slots) + len(proposer._states) == NUM_SLOTS


@pytest.mark.parametrize("mode", ["echo", "mixed"])
def test_requests_join_running_ones(
    llm: Any, many_prompts: list[list[int]], expected: list[list[int]], mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One more every second step; the cache holds few of them, so some are preempted and resumed."""
    monkeypatch.setattr(SwitchableEngine, "mode", mode)
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    preempted: list[str] = []
    preempt: Callable[..., Any] = scheduler._preempt_request
    monkeypatch.setattr(scheduler, "_preempt_request", lambda r, *a, **k: (preempted.append(r), preempt(r, *a, **k))[1])
    take_stats(llm)
    front = Front(llm)
    for index, prompt in enumerate(many_prompts):
        front.add(str(index), prompt)
        front.step(2)
    front.drain()
    assert [front.outputs[str(i)] for i in range(len(many_prompts))] == expected
    assert preempted
    stats = take_stats(llm)
    assert sum(stats["committed"].values()) == sum(map(len, expected))
    assert stats["accepted"] > 0
    check_no_slot_is_lost(llm)


def test_more_requests_than_slots(llm: Any, many_prompts: list[list[int]], expected: list[list[int]]) -> None:
    """Four are drafted for; the others decode plainly, token by token, and the counts say so."""
    few = slice(18, 26)
    take_stats(llm)
    assert generate(llm, many_prompts[few]) == expected[few]
    stats = take_stats(llm)
    drafted = stats["rounds"] + stats["accepted"]
    assert stats["accepted"] == stats["drafted"] and stats["blocks_by_origin"]["first"] == NUM_SLOTS
    # Of a request that is drafted for, only the token of its prefill comes without a block.
    assert drafted == NUM_SLOTS * (MAX_TOKENS - 1)
    assert stats["plain_tokens"] == NUM_SLOTS + (8 - NUM_SLOTS) * MAX_TOKENS


def test_abort_in_the_middle(llm: Any, many_prompts: list[list[int]], expected: list[list[int]]) -> None:
    """While they wait, prefill, and decode; others take their places at once."""
    front = Front(llm)
    names = [f"aborted-{i}" for i in range(8)]
    for name, prompt in zip(names, many_prompts, strict=False):
        front.add(name, prompt)
    for name in names:
        front.step(2)
        front.engine.abort_request([name])
        front.add(f"next-{name}", many_prompts[18 + names.index(name)])
    front.drain()
    assert not front.finished & set(names)
    assert [front.outputs[f"next-{name}"] for name in names] == expected[18:26]
    check_no_slot_is_lost(llm)


def test_the_same_name_again_after_an_abort(llm: Any, many_prompts: list[list[int]], expected: list[list[int]]) -> None:
    """A client that retries under its old id gets the answer to its new prompt."""
    front = Front(llm)
    front.add("client", many_prompts[18])
    front.step(3)
    front.engine.abort_request(["client"])
    front.add("client", many_prompts[19])
    front.drain()
    assert front.outputs["client"] == expected[19]


def test_states_of_a_slot_are_its_requests_own(
    llm: Any, target: Path, many_prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After aborts and reuse every slot holds the tapped states of exactly the tokens it holds: error below 1e-4."""
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr(SwitchableEngine, "mode", "mixed")
    front = Front(llm)
    for index in range(8):
        front.add(f"old-{index}", many_prompts[index])
    front.step(6)
    front.engine.abort_request([f"old-{index}" for index in range(8)])
    for index in range(NUM_SLOTS):
        front.add(f"new-{index}", many_prompts[26 + index])
    front.step(8)
    engine = SwitchableEngine.last
    assert isinstance(engine, SwitchableEngine)
    taps = worker_of(llm).vllm_config.speculative_config.target_layer_ids
    model = AutoModelForCausalLM.from_pretrained(target)
    starts = {tuple(prompt[:4]) for prompt in many_prompts[26 : 26 + NUM_SLOTS]}
    assert {tuple(history[:4]) for history in engine.history.values()} == starts
    for slot, history in engine.history.items():
        with torch.inference_mode():
            hidden = model(torch.tensor([history]), output_hidden_states=True).hidden_states
        correct = torch.cat([hidden[tap + 1][0] for tap in taps], dim=-1)[: len(history) - 1]
        states = engine.states[slot]
        held = torch.stack([states[position] for position in range(len(history) - 1)])
        assert torch.linalg.norm(held - correct) < 1e-4 * torch.linalg.norm(correct)
    front.drain()


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
def test_requests_shorter_than_a_block(
    llm: Any, many_prompts: list[list[int]], expected: list[list[int]], max_tokens: int
) -> None:
    take_stats(llm)
    outputs = generate(llm, many_prompts[18:], max_tokens=max_tokens)
    assert outputs == [output[:max_tokens] for output in expected[18:]]
    stats = take_stats(llm)
    assert sum(stats["committed"].values()) == max_tokens * len(outputs)
    # The last token is the target's own: with one or two there is no place for a draft token.
    assert (stats["drafted"] > 0) == (max_tokens > 2)


def test_prompts_that_leave_little_room(llm: Any, many_prompts: list[list[int]], expected: list[list[int]]) -> None:
    """1 to 10 tokens before ``max_model_len``, all lengths in one batch; drafts end one before it."""
    near = slice(8, 18)
    assert [len(output) for output in expected[near]] == [MAX_MODEL_LEN - n for n in NEAR_THE_END]
    for prompts, outputs in ((many_prompts[near], expected[near]), (many_prompts[near][::-1], expected[near][::-1])):
        take_stats(llm)
        assert generate(llm, prompts) == outputs
        stats = take_stats(llm)
        assert stats["accepted"] == stats["drafted"] > 0 and stats["invalid_blocks"] == 0


@pytest.mark.parametrize(
    ("gamma", "max_num_seqs", "mode"),
    [(1, 1, "mixed"), (2, 64, "mixed"), (15, 2, "mixed"), (31, 8, "mixed"), (31, 64, "echo")],
)
def test_any_block_and_any_batch(
    target: Path,
    known: Path,
    many_prompts: list[list[int]],
    expected: list[list[int]],
    gamma: int,
    max_num_seqs: int,
    mode: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(SwitchableEngine, "mode", mode)
    options = echo(known, gamma, draft_slots=max_num_seqs)
    with running_engine(target, max_num_seqs=max_num_seqs, speculative_config=options) as llm:
        assert generate(llm, many_prompts) == expected
        stats = take_stats(llm)
    assert stats["rounds"] > 0 and sum(stats["committed"].values()) == sum(map(len, expected))
    if mode == "echo":
        assert stats["accepted"] == stats["drafted"] and stats["accepted_lengths"][gamma] > 0


@pytest.fixture(scope="module")
def wide_checkpoint(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wide")
    return make_tiny_checkpoint(target, folder, block_size=32, copy_adapter=True).folder


REAL = [(1, 2), (2, 8), (15, 1), (31, 64)]
"""γ and ``max_num_seqs``."""


@pytest.mark.parametrize(("gamma", "max_num_seqs"), REAL)
def test_any_block_and_any_batch_with_the_real_engine(
    target: Path,
    wide_checkpoint: Path,
    many_prompts: list[list[int]],
    expected: list[list[int]],
    gamma: int,
    max_num_seqs: int,
) -> None:
    options = {
        "method": "jetspecpp",
        "model": str(wide_checkpoint),
        "transport": "local",
        "num_speculative_tokens": gamma,
    }
    some = slice(REAL.index((gamma, max_num_seqs)), None, len(REAL))  # every prompt in one of the cases
    with running_engine(target, **SMALL, max_num_seqs=max_num_seqs, speculative_config=options) as llm:
        assert generate(llm, many_prompts[some]) == expected[some]
        stats = take_stats(llm)
    assert stats["invalid_blocks"] == 0 and stats["rounds"] > 0
    assert sum(stats["committed"].values()) == sum(map(len, expected[some]))


@pytest.mark.parametrize("engine", ["echo", "real"])
def test_schedule_by_batch_size(
    target: Path,
    known: Path,
    wide_checkpoint: Path,
    many_prompts: list[list[int]],
    expected: list[list[int]],
    engine: str,
) -> None:
    """vLLM's own schedule: 7 draft tokens alone, 2 up to three requests, none beyond, and drafting resumes."""
    options = echo(known) | {"num_speculative_tokens_per_batch_size": [[1, 1, 9], [2, 3, 2], [4, 8, 0]]}
    if engine == "real":
        del options["draft_engine"]
        options["model"] = str(wide_checkpoint)
    names = ["a", "b", "c", "d", "e"]
    with running_engine(target, speculative_config=options) as llm:
        front = Front(llm)
        for name, prompt in zip(names, many_prompts[18:], strict=False):
            front.add(name, prompt, max_tokens=30 if name != "a" else MAX_TOKENS)
        front.step(12)
        crowded = take_stats(llm)
        front.drain()
        stats = take_stats(llm)
        assert [front.outputs[name] for name in names[1:]] == [output[:30] for output in expected[19:23]]
        assert front.outputs["a"] == expected[18]
        if engine == "echo":
            told = SwitchableEngine.last
            assert isinstance(told, SwitchableEngine)
            drafted_by_batch = {
                (len(batch.requests), request.max_draft_tokens)
                for batch in told.messages
                for request in batch.requests
                if request.max_draft_tokens > 2 or len(batch.requests) > 1
            }
            assert {room for size, room in drafted_by_batch if size >= 4} == {0}
            assert max(room for size, room in drafted_by_batch if size == 1) == 7
    assert crowded["drafted"] == crowded["rounds"] == 0 and crowded["plain_tokens"] == 5 * 12
    assert stats["rounds"] > 0 and stats["plain_tokens"] >= 5 * 17
    if engine == "echo":
        assert stats["accepted"] == stats["drafted"] > 0 and stats["accepted_lengths"][7] > 0
