"""Packed int8 networks: close to plain ones, and nothing but drafts depends on them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.tiny_round import Tiny, random_tokens
from vllm_jetspecpp.config import EngineConfig, RoundConfig
from vllm_jetspecpp.models.attention import KeysValues, Rope
from vllm_jetspecpp.models.networks import largest, load_networks
from vllm_jetspecpp.models.packed_layers import FloatNorm, PackedContext, PackedLayer, PackedTaps
from vllm_jetspecpp.models.packed_linear import PackedLinear, ReorderedLinear
from vllm_jetspecpp.models.smoothing import LargestInputs, smoothing
from vllm_jetspecpp.models.target_layers import LayerConfig, RMSNorm, TransformerLayer
from vllm_jetspecpp.runtime.draft_engine import DraftEngine
from vllm_jetspecpp.transport.messages import NO_BLOCK, Verified, VerifiedBatch
from vllm_jetspecpp.types import Origin

pytestmark = pytest.mark.skipif(
    "x86" not in torch.backends.quantized.supported_engines, reason="PyTorch has no int8 kernels for this CPU"
)


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Of two tensors, relative to the second."""
    return float(((a.float() - b.float()).norm() / b.float().norm()).detach())


@pytest.fixture(params=[False, True], ids=["plain heads", "normed heads"])
def layers(request: pytest.FixtureRequest) -> list[TransformerLayer]:
    torch.manual_seed(0)
    config = LayerConfig(64, 128, 4, 2, 16, 1e-5, qk_norm=request.param, attention_bias=True)
    layers = [TransformerLayer(config).eval().requires_grad_(False) for _ in range(3)]
    for layer in layers:
        for name, parameter in layer.named_parameters():
            if "norm" in name:
                nn.init.uniform_(parameter, 0.5, 1.5)
    return layers


def rope_of(length: int) -> Rope:
    angle = torch.rand(2, length, 16)
    return Rope(angle.cos(), angle.sin())


def test_joined_products_are_the_products() -> None:
    """To int8's resolution: a 254th of the largest value, for weights and for rows."""
    torch.manual_seed(0)
    modules = [nn.Linear(96, n, bias=bias) for n, bias in ((40, True), (24, True))]
    x = torch.randn(3, 5, 96)
    joined = PackedLinear.join(*modules)(x)
    assert joined.shape == (3, 5, 64) and joined.dtype is torch.float32
    assert difference(joined, torch.cat([m(x) for m in modules], -1)) < 0.02
    assert difference(PackedLinear.join(modules[0])(x.bfloat16()), modules[0](x)) < 0.02


def test_packed_layer_is_the_layer(layers: list[TransformerLayer]) -> None:
    """With what its products have seen and without."""
    plain, rope, inputs = layers[0], rope_of(6), LargestInputs()
    x, states = torch.randn(2, 6, 64), torch.randn(2, 6, 64)
    context = [KeysValues(torch.randn(2, 2, 9, 16), torch.randn(2, 2, 9, 16))]
    mask = torch.cat([torch.rand(2, 6, 9) < 0.7, torch.ones(6, 6, dtype=torch.bool).tril().expand(2, -1, -1)], -1)
    with inputs.watching(plain):
        hidden, own = plain(x, rope, context, mask)
    for packed in (PackedLayer(plain, inputs), PackedLayer(plain, LargestInputs())):
        packed_hidden, packed_own = packed(x, rope, context, mask)
        assert difference(packed_hidden, hidden) < 0.02
        known, expected = packed.context_keys_values(states, rope), plain.context_keys_values(states, rope)
        for a, b in (*zip(packed_own, own, strict=True), *zip(known, expected, strict=True)):
            assert difference(a, b) < 0.03


def test_a_large_channel_does_not_drown_the_others() -> None:
    torch.manual_seed(0)
    linear, inputs = nn.Linear(96, 64), LargestInputs()
    x = torch.randn(4, 96)
    x[:, 5] *= 200
    with torch.no_grad(), inputs.watching(linear):
        expected = linear(x)
    factor = smoothing(inputs[linear], linear.weight)
    smoothed = PackedLinear.join(linear, columns=factor)(x / factor)
    assert difference(smoothed, expected) < 0.02 < difference(PackedLinear.join(linear)(x), expected)


def test_context_of_all_layers_at_once(layers: list[TransformerLayer]) -> None:
    """Of one normalised input, and of tapped states that two and one layers read."""
    x, states, rope = torch.randn(2, 6, 64), torch.randn(2, 6, 128), rope_of(6)
    first, second = states.chunk(2, -1)
    joined = [*PackedContext(layers)(x, rope), *PackedTaps([layers[:2], layers[2:]], LargestInputs())(states, rope)]
    expected = [layer.keys_values(x, rope) for layer in layers]
    expected += [layer.context_keys_values(s, rope) for layer, s in zip(layers, (first, first, second), strict=True)]
    for own, plain in zip(joined, expected, strict=True):
        for a, b in zip(own, plain, strict=True):
            assert a.shape == b.shape and difference(a, b) < 0.03


@pytest.mark.parametrize("size", [128, 384, 100])
def test_largest_is_the_first_maximum(size: int) -> None:
    values = torch.randint(0, 7, (3, 4, size), generator=torch.Generator().manual_seed(0)).float()
    found, expected = largest(values), values.max(-1)
    assert torch.equal(found.values, expected.values)
    assert torch.equal(found.indices, (values == expected.values[..., None]).int().argmax(-1))


@torch.inference_mode()
def test_rounds_over_packed_networks(tiny: Tiny) -> None:
    """The decoder's word on a block is that of plain networks, nearly; and a round runs."""
    plain = tiny.config(RoundConfig(5))
    packed = EngineConfig(plain.target, plain.checkpoint, plain.round, 4, plain.max_model_len, weights="int8")
    reference = EngineConfig(plain.target, plain.checkpoint, plain.round, 4, plain.max_model_len, weights="plain")
    nets = [load_networks(config)[0] for config in (packed, reference)]
    assert nets[0].target.packed_head is not None and nets[1].target.packed_head is None
    hidden = torch.randn(1, 8, nets[0].layer_config.hidden_size)
    logits = [n.target.logits(hidden.to(torch.float32 if n is nets[0] else torch.bfloat16)) for n in nets]
    assert difference(*logits) < 0.03
    engine = DraftEngine(packed)
    tokens = random_tokens(20, seed=3)
    states = tiny.states(tokens).bfloat16()
    first = Verified(0, 0, torch.tensor(tokens[:11]), 0, states[:10], NO_BLOCK, 0, True, 5, True)
    answer = engine.answer(VerifiedBatch(1, (first,)))
    assert answer.drafts[0].origin == Origin.FIRST and len(answer.drafts[0].tokens) == 5
    engine.work()
    # The likeliest outcome is answered from the cache: it is among those drafted for.
    stored = engine.cache._slots[0].blocks
    outcome, block = next(iter(stored.items()))
    taken = [*answer.drafts[0].tokens[: outcome.num_accepted], outcome.bonus_token]
    start, count = 11, outcome.num_accepted + 1
    second = Verified(
        0, start, torch.tensor(taken), 10, states[10 : 10 + count], outcome.num_accepted, 5, True, 5, False
    )
    (draft,) = engine.answer(VerifiedBatch(2, (second,))).drafts
    assert draft.origin == Origin.HIT and draft.tokens == block.tokens


def test_what_cannot_be_packed_is_refused() -> None:
    for options, what in (({"dtype": "float32"}, "cpu and float32"), ({"device": "cuda:1"}, "cuda:1 and bfloat16")):
        with pytest.raises(ValueError, match=f"draft_weights 'int8' is for a draft process on a CPU .* got {what}"):
            EngineConfig("t", "c", RoundConfig(7), 1, 128, weights="int8", **options)
    with pytest.raises(ValueError, match=r"draft_weights must be one of 'auto', 'int8', 'plain', got 'int4'"):
        EngineConfig("t", "c", RoundConfig(7), 1, 128, weights="int4")


@pytest.mark.parametrize("rows", [1, 4, 300])
def test_reordered_product_is_the_product(rows: int) -> None:
    torch.manual_seed(0)
    for dtype in (torch.bfloat16, torch.float32):
        linear = nn.Linear(96, 64, bias=False, dtype=dtype)
        x = torch.randn(2, rows, 96, dtype=dtype)
        assert difference(ReorderedLinear(linear)(x), linear(x)) < 0.01


@pytest.mark.parametrize("scale", [0.0, 1e-4, 1.0, 1e4])
def test_float_norm_is_the_norm(scale: float) -> None:
    """Also where ε decides, and of nothing at all: rows that pad a message are zeros."""
    torch.manual_seed(0)
    norm = RMSNorm(96, 1e-5)
    nn.init.uniform_(norm.weight, 0.5, 1.5)
    x = scale * torch.randn(3, 96)
    assert torch.allclose(FloatNorm(norm)(x), norm(x), rtol=1e-5, atol=1e-7)
