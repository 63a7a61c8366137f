"""The plain trainer: losses, blocks, and the whole recipe on a tiny target."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny_models import make_tiny_llama
from vllm_jetspecpp.models.checkpoint import check_checkpoint
from vllm_jetspecpp.models.target_parts import load_target_config
from vllm_jetspecpp.training import recipe
from vllm_jetspecpp.training.blocks import BlockBatch, make_batch, noise_tokens
from vllm_jetspecpp.training.config import AdapterConfig, DraftConfig
from vllm_jetspecpp.training.losses import forward_kl, masked_mean, state_loss
from vllm_jetspecpp.training.prefix_schedule import clean_prefix_lengths
from vllm_jetspecpp.training.regenerate import Sequence, _save, read_sequences
from vllm_jetspecpp.training.setup import default_taps
from vllm_jetspecpp.training.target_states import StateCache, open_cache
from vllm_jetspecpp.training.train_adapter import source_layers

SIZES = recipe.Sizes(block_size=4, num_draft_layers=1, num_taps=3, layers_per_module=(1,), draft_vocab_size=64)


def test_taps_are_the_papers() -> None:
    """Qwen3-8B: 1, 9, 17, 25, 33 of 36; and every module is copied from layers it stands for."""
    assert default_taps(36) == [1, 9, 17, 25, 33]
    assert source_layers((1, 7, 14), (1, 2, 3)) == [[1], [4, 7], [9, 12, 14]]


@pytest.mark.parametrize("scale", [1.0, 30.0, 300.0])
def test_forward_kl_equals_float64(scale: float) -> None:
    """Saturated rows included: no NaN, and never below zero by more than rounding."""
    generator = torch.Generator().manual_seed(0)
    p, q = (torch.randn(6, 50, generator=generator, dtype=torch.float64) * scale for _ in "pq")
    expected = (p.softmax(-1) * (p.log_softmax(-1) - q.log_softmax(-1))).sum(-1)
    torch.testing.assert_close(forward_kl(p.float(), q.float()).double(), expected, rtol=1e-4, atol=1e-4)
    assert forward_kl(p.float(), p.float()).abs().max() < 1e-5


def test_state_loss_is_zero_for_the_truth_and_counts_every_tap_alike() -> None:
    true = torch.randn(5, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    scale = torch.tensor([1.0] * 4 + [10.0] * 4, dtype=torch.float64)
    assert state_loss(true, true, scale).abs().max() < 1e-6
    shallow, deep = true.clone(), true.clone()
    shallow[:, 0] += 0.3
    deep[:, 4] += 3.0
    l1 = [torch.nn.functional.smooth_l1_loss(x / scale, true / scale) for x in (shallow, deep)]
    assert l1[0].item() == pytest.approx(l1[1].item())
    plain = torch.nn.functional.smooth_l1_loss(shallow / scale, true / scale, reduction="none").mean(-1)
    cosine = 1 - torch.nn.functional.cosine_similarity(shallow / scale, true / scale, dim=-1)
    torch.testing.assert_close(state_loss(shallow, true, scale).double(), plain + cosine, atol=1e-6, rtol=1e-5)


def test_masked_mean_ignores_what_has_no_weight() -> None:
    values = torch.tensor([1.0, float("nan"), 3.0])
    assert masked_mean(values, torch.tensor([1.0, 0.0, 3.0])).item() == pytest.approx(2.5)
    assert masked_mean(values, torch.zeros(3)).item() == 0.0


def test_clean_prefix_schedule() -> None:
    """m = 0 as often as asked (within four standard deviations), every other length of 1..γ-1 about equally often."""
    m = clean_prefix_lengths(torch.Size((200, 100)), 8, 0.5, torch.Generator().manual_seed(0))
    counts = m.flatten().bincount(minlength=8)
    assert abs(counts[0].item() - 10_000) < 4 * 70.7 and counts[7] == 0
    assert counts[1:7].min() > 0.85 * counts[1:7].max()


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A work folder with a tiny target's states over 40 random sequences."""
    folder = tmp_path_factory.mktemp("work")
    target = make_tiny_llama(folder / "target")
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(12, 40, (40,), generator=generator).tolist()
    # Half the vocabulary, so that a shortlist of that size covers it.
    sequences = [Sequence(torch.randint(0, 64, (n,), generator=generator, dtype=torch.int32), 4) for n in lengths]
    (folder / "answers").mkdir()
    _save(folder / "answers/shard-0of1-00000.safetensors", sequences)
    recipe.begin(str(target), folder / "answers", folder, SIZES)
    recipe.states(str(target), folder, SIZES)
    return folder


def test_answers_are_read_back(work: Path) -> None:
    assert [s.prompt_length for s in read_sequences(work / "answers")] == [4] * 40
    with pytest.raises(FileNotFoundError, match="run `jetspecpp regenerate` first"):
        next(read_sequences(work))


def batch_of(cache: StateCache) -> BlockBatch:
    return make_batch(cache, [0, 3, 7], num_anchors=5, block_size=4, gen=torch.Generator().manual_seed(2))


def test_blocks_equal_a_loop_over_anchors(work: Path) -> None:
    cache = open_cache(work / "states")
    batch = batch_of(cache)
    mask, length = batch.mask(), batch.context.shape[1]
    for row, member in enumerate((0, 3, 7)):
        offset = int(cache.sequences.offsets[member])
        tokens = cache.sequences.tokens[offset : int(cache.sequences.offsets[member + 1])]
        for a, anchor in enumerate(batch.anchors[row].tolist()):
            assert 4 <= anchor < len(tokens) - 1
            for i in range(4):
                inside = anchor + i < len(tokens)
                assert bool(batch.inside[row, a, i]) == inside
                if inside:
                    assert batch.tokens[row, a, i] == tokens[anchor + i]
                    assert torch.equal(batch.states[row, a, i], cache.states[offset + anchor + i])
                seen = mask[row, a * 4 + i].nonzero().flatten().tolist()
                assert seen == [*range(anchor), *(length + a * 4 + j for j in range(i + 1))]


def test_noise_comes_from_before_the_anchor(work: Path) -> None:
    batch = batch_of(open_cache(work / "states"))
    noise = noise_tokens(batch, torch.Generator().manual_seed(0))
    for row in range(3):
        for a, anchor in enumerate(batch.anchors[row].tolist()):
            assert set(noise[row, a].tolist()) <= set(batch.sequence[row, :anchor].tolist())


OPTIONS: dict[str, Any] = {"held_out": 8, "anchors": 4, "validate_every": 10**6, "save_every": 10**6}
CONFIGS = {
    "draft": DraftConfig(steps=40, learning_rate=3e-3, **OPTIONS),
    "adapter": AdapterConfig(steps=40, learning_rate=3e-3, **OPTIONS),
}
MEASURES = {"draft": "loss", "adapter": "kl"}


def test_recipe_trains_and_packs(work: Path) -> None:
    """Both parts learn something in seconds, go on, and what is packed is a checkpoint for this target."""
    target = str(work / "target")
    for part, config in CONFIGS.items():
        # Random sequences have nothing to say of the next token: what can be learnt is the target's own mapping.
        recipe.train_part(part, target, work, SIZES, config)
        recipe.train_part(part, target, work, SIZES, replace(config, steps=60))
        first, second, third = recipe.read_run(work, part)["record"]
        assert (first["step"], second["step"], third["step"]) == (0, 40, 60)
        assert third[MEASURES[part]] < second[MEASURES[part]] < first[MEASURES[part]]
    recipe.pack(target, "tiny", work, work / "checkpoint", SIZES)
    info = check_checkpoint(work / "checkpoint", load_target_config(Path(target)))
    assert (info.block_size, info.draft_vocab_size, info.num_draft_layers) == (4, 64, 1)
