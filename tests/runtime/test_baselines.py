"""Every rival is lossless, drafts what its formulas say, and has the same rounds along a recorded answer."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.naive_round import NaiveRound
from tests.tiny_models import make_tiny_llama
from tests.tiny_rivals import METHODS, make_tiny_rival, make_tiny_small_model, rewrite
from tests.tiny_round import TAPS, Tiny, follows_the_target, random_tokens
from vllm_jetspecpp.benchmarking.methods import is_packed
from vllm_jetspecpp.config import RoundConfig
from vllm_jetspecpp.evaluation.baselines.autoregressive import AutoregressiveEngine, follow_autoregressive
from vllm_jetspecpp.evaluation.baselines.base import PlainEngine, SequenceEngine
from vllm_jetspecpp.evaluation.baselines.ngram import NgramEngine
from vllm_jetspecpp.evaluation.baselines.parallel import ParallelEngine, Rival
from vllm_jetspecpp.evaluation.replay_engine import ReplayEngine
from vllm_jetspecpp.models.checkpoint import CheckpointInfo
from vllm_jetspecpp.models.rival_checkpoint import load_rival, read_rival, save_rival, unpack_rival
from vllm_jetspecpp.models.small_model import load_small_model
from vllm_jetspecpp.models.target_parts import load_target_config
from vllm_jetspecpp.runtime.base import Engine
from vllm_jetspecpp.runtime.offline import Generation, OfflineTarget, follow, generate
from vllm_jetspecpp.types import Origin

ALL = ("plain", "ngram", *METHODS, "ssd", "draft-only", "jetspecpp")
FAN_OUT = (6, 5, 4, 3, 2, 2, 2, 2)


@pytest.fixture(scope="module")
def rivals(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rivals")
    for method in METHODS:
        make_tiny_rival(tiny.target, folder / method, method)
    make_tiny_small_model(folder / "ssd")
    return folder


def make_engine(method: str, tiny: Tiny, rivals: Path, count: int = 5) -> Any:
    """An engine of ``method`` in float32; the target taps the same layers for all."""
    if method == "plain":
        return PlainEngine(count)
    if method == "ngram":
        return NgramEngine(count)
    if method == "ssd":
        fan_out = FAN_OUT[: count + 1]
        return AutoregressiveEngine(
            load_small_model(rivals / "ssd", tiny.target, torch.float32), count, fan_out, fan_out
        )
    if method == "jetspecpp":
        config = tiny.config(RoundConfig(count, 6, 1, 1))
        return ReplayEngine.from_networks(config, tiny.networks(config.round))
    if method == "draft-only":
        return ParallelEngine(Rival.load(tiny.checkpoint, tiny.target, 256, torch.float32), count, 2)
    return ParallelEngine(Rival.load(rivals / method, tiny.target, 256, torch.float32), count, 0)


@pytest.mark.parametrize("method", ALL)
def test_greedy_output_is_the_targets_and_recorded_answers_have_the_same_rounds(
    tiny: Tiny, rivals: Path, method: str
) -> None:
    for seed in (1, 2):
        prompt = random_tokens(12, seed)
        result = generate(tiny.offline(), make_engine(method, tiny, rivals), prompt, max_tokens=40)
        answer = tiny.greedy(prompt, 52)
        assert result.tokens == answer[:40]
        assert followed(tiny, make_engine(method, tiny, rivals), prompt, answer, 40).rounds == result.rounds


def followed(tiny: Tiny, engine: Engine, prompt: list[int], answer: list[int], counted: int) -> Generation:
    tokens = [*prompt, *answer]
    return follow(engine, tokens, tiny.states(tokens), prompt_length=len(prompt), counted=counted)


@pytest.mark.parametrize("method", ["ngram", *METHODS, "ssd"])
def test_temperature_one_follows_the_target(tiny: Tiny, rivals: Path, method: str) -> None:
    """The third token over many seeds. False alarm: .001 a method and family."""
    prompt, count = random_tokens(6, seed=2), 200
    engine, target, seen = make_engine(method, tiny, rivals, 2), tiny.offline(), Counter[int]()
    for seed in range(count):
        generator = torch.Generator().manual_seed(seed)
        result = generate(target, engine, prompt, max_tokens=3, temperature=1.0, generator=generator)
        seen[result.tokens[2]] += 1
    assert follows_the_target(tiny, prompt, seen, count)


def test_sampled_answers_have_the_same_rounds(tiny: Tiny, rivals: Path) -> None:
    """At temperature 1 acceptance can be read off the answer too."""
    prompt, generator, accepted = random_tokens(12, 3), torch.Generator().manual_seed(0), 0
    for method in ("jetspec", "ssd", "jetspecpp"):
        result = generate(
            tiny.offline(),
            make_engine(method, tiny, rivals),
            prompt,
            max_tokens=60,
            temperature=1.0,
            generator=generator,
        )
        accepted += sum(outcome.num_accepted for _, outcome in result.rounds)
        again = followed(tiny, make_engine(method, tiny, rivals), prompt, result.tokens, 40).rounds
        assert again == result.rounds[: len(again)]
    assert accepted > 0


class EchoEngine(SequenceEngine):
    """Drafts what the target will say."""

    def __init__(self, tiny: Tiny, count: int) -> None:
        super().__init__(count)
        self.tiny = tiny

    def draft(self) -> tuple[int, ...]:
        return tuple(self.tiny.greedy(self.tokens, self.num_draft_tokens))


def test_an_echo_has_the_longest_acceptance(tiny: Tiny) -> None:
    prompt = random_tokens(10, 4)
    result = generate(tiny.offline(), EchoEngine(tiny, 5), prompt, max_tokens=25)
    assert result.acceptance_length == 6 and len(result.rounds) == 4
    answer = tiny.greedy(prompt, 40)
    assert followed(tiny, EchoEngine(tiny, 5), prompt, answer, 25).acceptance_length == 6


def test_autoregressive_rounds_from_one_pass(tiny: Tiny, rivals: Path) -> None:
    """The fast path of SSD has the outcomes, hits and misses of the engine that drafts token by token."""
    origins = set()
    for seed in range(4):
        prompt = random_tokens(12, seed)
        answer = tiny.greedy(prompt, 60)
        slow = followed(tiny, make_engine("ssd", tiny, rivals), prompt, answer, 50).rounds
        fast = follow_autoregressive(
            make_engine("ssd", tiny, rivals), [*prompt, *answer], prompt_length=len(prompt), counted=50
        )
        assert fast == slow
        origins |= {origin for origin, _ in fast}
    assert origins == {Origin.FIRST, Origin.HIT, Origin.FALLBACK}


def test_draft_model_alone_is_the_method_without_refresh(tiny: Tiny, rivals: Path) -> None:
    """J passes from true states equal the plain reference of the round's fallback."""
    tokens = random_tokens(20, 7)
    states = tiny.states(tokens[:-1])
    engine = make_engine("draft-only", tiny, rivals)
    engine.tokens = tokens
    config = RoundConfig(5, fallback_passes=2)
    with torch.inference_mode():
        engine.commit(0, states)
        assert list(engine.draft()) == NaiveRound(tiny.networks(config), config, tokens, states).fallback()


@torch.inference_mode()
def reference_logits(engine: ParallelEngine, tokens: list[int], states: Tensor) -> Tensor:
    """Logits [γ, draft_vocab] of a block behind ``tokens``, every row by itself: what it sees decides, no mask does."""
    model, start, count = engine.parts.draft_model, len(tokens) - 1, engine.num_draft_tokens
    rope = engine._rotary(torch.arange(start)[None])
    context = model.context_keys_values(states[None], rope)
    rows = []
    for i in range(1, count + 1):
        length = i + 1 if engine.info.causal else count + 1
        block = torch.tensor([[tokens[-1], *[3] * (length - 1)]])
        everything = torch.ones(1, length, start + length, dtype=torch.bool)
        if engine.info.causal:
            everything[:, :, start:] = everything[:, :, start:].tril()
        hidden = model(
            engine.parts.embedding[block],
            engine._rotary(torch.arange(start, start + length)[None]),
            [[kv] for kv in context],
            everything,
        )
        rows.append(hidden[0, i])
    return torch.stack(rows)


@pytest.mark.parametrize("method", METHODS)
def test_rivals_draft_what_their_formulas_say(tiny: Tiny, rivals: Path, method: str) -> None:
    """Base logits, then the correction by the true formula: a bigram bias, or a GRU over all tokens before."""
    tokens = random_tokens(20, 8)
    states = tiny.states(tokens[:-1])
    engine = make_engine(method, tiny, rivals)
    engine.tokens = tokens
    with torch.inference_mode():
        engine.commit(0, states)
        drafts = engine.draft()
        hidden = reference_logits(engine, tokens, states)
        model, head, ids = engine.parts.draft_model, engine.parts.head, engine.parts.head_token_ids
        expected: list[int] = []
        for i, row in enumerate(hidden):
            before = [tokens[-1], *expected]
            logits = head @ row
            if method == "dspark":
                weights = dict(model.correction.named_parameters())
                logits = logits + weights["markov_w2.weight"] @ weights["markov_w1.weight"][before[-1]]
            if method == "domino" and i >= 1:
                _, state = model.correction.prefix_gru(engine.parts.embedding[torch.tensor([before])])
                logits = logits + model.correction.embed_proj(torch.cat([row, state[0, 0]]))
            expected.append(int(ids[logits.argmax()]))
    assert list(drafts) == expected
    assert len(set(drafts)) > 1


def test_a_block_longer_than_trained_leaves_a_causal_draft_unchanged(tiny: Tiny, rivals: Path) -> None:
    """What the paper says of budget 32: a causal model drafts the first tokens alike, DFlash does not."""
    tokens = random_tokens(30, 9)
    drafts = {}
    for method in ("jetspec", "dflash"):
        for count in (7, 15):
            engine = make_engine(method, tiny, rivals, count)
            engine.tokens = tokens
            with torch.inference_mode():
                engine.commit(0, tiny.states(tokens[:-1]))
                drafts[method, count] = engine.draft()
    assert drafts["jetspec", 15][:7] == drafts["jetspec", 7]
    assert drafts["dflash", 15][:7] != drafts["dflash", 7]


def test_ngram_copies_what_followed() -> None:
    engine = NgramEngine(3)
    engine.tokens = [5, 6, 7, 8, 9, 1, 6, 7]
    assert engine.draft() == (8, 9, 1)
    engine.tokens = [1, 2, 3]
    assert engine.draft() == ()


def test_published_layouts_load(tiny: Tiny, rivals: Path, tmp_path: Path) -> None:
    """Names below ``model.``, maps of either name, unused heads, and drafts that start at the anchor's row."""
    hf_config = load_target_config(tiny.target)
    more = {"t2d": torch.zeros(128, dtype=torch.bool), "confidence_head.proj.weight": torch.zeros(1, 64)}
    dspark = rewrite(rivals / "dspark", tmp_path / "dspark", {"sample_from_anchor": None}, more, prefix="model.")
    info = read_rival(dspark, hf_config)
    assert (info.method, info.shifted, info.causal, info.markov_rank) == ("dspark", True, False, 8)
    engine = ParallelEngine(Rival.load(dspark, tiny.target, 256, torch.float32), 5, 0)
    prompt = random_tokens(12, 1)
    assert generate(OfflineTarget(tiny.model, TAPS), engine, prompt, max_tokens=20).tokens == tiny.greedy(prompt, 20)
    section = json.loads((rivals / "domino/config.json").read_text())["dflash_config"]
    domino = rewrite(rivals / "domino", tmp_path / "domino", {"dflash_config": section | {"shift_label": True}}, {})
    assert read_rival(domino, hf_config).shifted and read_rival(domino, hf_config).skipped == 1
    whole = make_tiny_rival(tiny.target, tmp_path / "whole", "dflash", draft_vocab_size=128)
    assert len(ParallelEngine(Rival.load(whole, tiny.target, 256, torch.float32), 3, 0).parts.head_token_ids) == 128


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["EagleModel"]}, r"architectures must be \['DFlashDraftModel'\] or \['Qwen3DSparkModel'\]"),
        ({"dflash_config": {"target_layer_ids": [1, 3, 5]}}, "key 'mask_token_id' is missing"),
        ({"dflash_config": {"target_layer_ids": [1, 3, 99], "mask_token_id": 3}}, r"must lie in 0\.\.7"),
        ({"hidden_size": 32}, "hidden_size is 32, the target's is 64: it is for another target"),
        (
            {"dflash_config": {"target_layer_ids": [1, 3, 5], "mask_token_id": 3, "projector_type": "dominoes"}},
            "projector_type must be 'dflash' or 'domino', got 'dominoes'",
        ),
    ],
)
def test_checkpoints_that_do_not_fit_say_why(
    tiny: Tiny, rivals: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        read_rival(rewrite(rivals / "dflash", tmp_path / "changed", change, {}), load_target_config(tiny.target))
    with pytest.raises(ValueError, match="one request at a time"):
        NgramEngine(3).answer(type("Batch", (), {"requests": ()})())  # type: ignore[arg-type]


def test_a_rival_stored_as_differences_is_written_out_in_full(tmp_path: Path) -> None:
    """As vLLM loads it: its own head and map of tokens, and the weights that the differences stand for."""
    target = make_tiny_llama(tmp_path / "target")
    hf_config = load_target_config(target)
    base = make_tiny_rival(target, tmp_path / "base", "dflash")
    parts = load_rival(read_rival(base, hf_config), target, hf_config, torch.float32)
    for weight in parts.draft_model.parameters():
        weight.mul_(1.1)
    info = CheckpointInfo(tmp_path / "packed", TAPS, 8, 2, (1, 1, 1), 100, hf_config.max_position_embeddings)
    save_rival(info, hf_config, parts, method="dflash", causal=False, mask_token_id=3, training={}, base=base)
    assert is_packed(info.folder)
    unpack_rival(info.folder, target, hf_config, tmp_path / "full")
    assert not is_packed(tmp_path / "full")
    stored = load_file(tmp_path / "full/model.safetensors")
    assert {"d2t", "lm_head.weight"} <= set(stored) and not any("delta" in name for name in stored)
    packed, full = (
        load_rival(read_rival(folder, hf_config), target, hf_config, torch.bfloat16)
        for folder in (info.folder, tmp_path / "full")
    )
    assert read_rival(tmp_path / "full", hf_config).mask_token_id == 3
    assert torch.equal(packed.head, full.head) and torch.equal(packed.head_token_ids, full.head_token_ids)
    for name, value in packed.draft_model.state_dict().items():
        torch.testing.assert_close(value, full.draft_model.state_dict()[name], msg=name)
