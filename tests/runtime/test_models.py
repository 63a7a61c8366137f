"""Adapter, decoder and caches against the target itself."""

from __future__ import annotations

import torch

from tests.naive_round import true_context
from tests.tiny_round import TAPS, Tiny, random_tokens
from vllm_jetspecpp.config import RoundConfig
from vllm_jetspecpp.foresight.foresight import simulate_verification
from vllm_jetspecpp.foresight.masks import BranchMasks
from vllm_jetspecpp.models.attention import KeysValues, attend
from vllm_jetspecpp.runtime.kv_cache import View


@torch.inference_mode()
def test_decoder_over_true_states_is_the_target(tiny: Tiny) -> None:
    """The target's last layers over its own states give its own logits, through committed caches."""
    engine = tiny.engine(RoundConfig(7))
    tokens = random_tokens(30, seed=4)
    states = tiny.states(tokens)
    engine.states.commit([2], [0], [states[:22]])
    prefix = engine.states.prefix([2], [22])
    masks = BranchMasks(1, 8, torch.device("cpu"))
    mask = torch.cat([masks.prefix(prefix.mask), masks.own(torch.zeros(1, 1, dtype=torch.int64))], -1)
    rope = engine.nets.target.rotary(torch.arange(22, 30)[None])
    block = engine.nets.deepest(states[None, 22:])
    hidden, _ = engine.nets.target.decoder(block, rope, [[kv] for kv in prefix.context.decoder[0]], mask)
    expected = tiny.model(torch.tensor([tokens])).logits[0, 22:, engine.nets.target.head_token_ids]
    torch.testing.assert_close(engine.nets.target.logits(hidden)[0], expected, atol=2e-4, rtol=1e-4)


@torch.inference_mode()
def test_committed_keys_equal_plain_ones(tiny: Tiny) -> None:
    """Every layer's keys and values after padded, chunked commits, against one position at a time."""
    engine = tiny.engine(RoundConfig(4))
    tokens = random_tokens(21, seed=8)
    states = tiny.states(tokens)
    for start, end in ((0, 9), (9, 12), (12, 13), (13, 21)):
        engine.states.commit([1], [start], [states[start:end]])
    plain = true_context(engine.nets, states, list(range(21)))
    pairs = ((engine.states.draft_model, plain.draft), (engine.states.adapter, plain.adapter))
    for cache, expected in (*pairs, (engine.states.decoder, plain.decoder)):
        for layer, (keys, values) in enumerate(expected):
            own = cache.read(layer, View(torch.tensor([1]), 21))
            torch.testing.assert_close(own.keys[0].transpose(0, 1), keys, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(own.values[0].transpose(0, 1), values, atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_adapter_without_context_is_the_target(tiny: Tiny) -> None:
    """With the target's own layers between the taps and no context, the adapter's states are the target's, exactly."""
    engine = tiny.engine(RoundConfig(7))
    tokens = random_tokens(8, seed=6)
    prefix = engine.states.prefix([0], [1])
    masks = BranchMasks(1, 8, torch.device("cpu"))
    own = masks.own(torch.zeros(1, 1, dtype=torch.int64))
    mask = torch.cat([torch.zeros(1, 8, prefix.mask.shape[1], dtype=torch.bool), own], -1)
    rope = engine.nets.target.rotary(torch.arange(8)[None])
    embeddings = engine.nets.target.embed(torch.tensor([tokens]))
    states = engine.nets.adapter(embeddings, rope, [[kv] for kv in prefix.context.adapter[0]], mask)
    torch.testing.assert_close(states[0], tiny.states(tokens), atol=2e-4, rtol=1e-4)
    assert states.shape[-1] == len(TAPS) * 64
    simulated = simulate_verification(engine.nets, torch.tensor([tokens]), torch.arange(8)[None], prefix.context, mask)
    expected = tiny.model(torch.tensor([tokens])).logits[0, :, engine.nets.target.head_token_ids]
    torch.testing.assert_close(engine.nets.target.logits(simulated.hidden)[0], expected, atol=5e-4, rtol=1e-3)


def test_attention_equals_dense_softmax() -> None:
    """Grouped heads, several segments, any mask; float32 to 1e-5, bfloat16 to its own resolution."""
    generator = torch.Generator().manual_seed(0)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        for heads, kv_heads, length, sizes in ((4, 2, 5, (7, 5)), (9, 3, 1, (1, 2, 3)), (2, 2, 17, (33,))):
            queries = torch.randn(2, heads, length, 16, generator=generator).to(dtype)
            segments = [
                KeysValues(*(torch.randn(2, kv_heads, n, 16, generator=generator).to(dtype) for _ in "kv"))
                for n in sizes
            ]
            mask = torch.rand(2, length, sum(sizes), generator=generator) < 0.5
            mask[..., 0] = True
            keys = torch.cat([s.keys for s in segments], 2).float().repeat_interleave(heads // kv_heads, 1)
            values = torch.cat([s.values for s in segments], 2).float().repeat_interleave(heads // kv_heads, 1)
            scores = (queries.float() @ keys.transpose(-1, -2) / 4).masked_fill(~mask[:, None], float("-inf"))
            expected = scores.softmax(-1) @ values
            torch.testing.assert_close(
                attend(queries, segments, mask).float(), expected, atol=tolerance, rtol=tolerance
            )
