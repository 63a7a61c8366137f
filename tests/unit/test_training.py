"""Training: losses, blocks, schedules, states, and the whole recipe on a tiny target."""

from __future__ import annotations

import itertools
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.tiny_rivals import eagle3_logits
from tests.tiny_training import SIZES, make_training_data
from vllm_jetspecpp.evaluation.baselines.autoregressive import AutoregressiveEngine
from vllm_jetspecpp.evaluation.baselines.parallel import ParallelEngine, Rival
from vllm_jetspecpp.models.checkpoint import check_checkpoint
from vllm_jetspecpp.models.eagle3 import eagle3_taps, load_head
from vllm_jetspecpp.models.rival_checkpoint import load_rival, read_rival
from vllm_jetspecpp.models.small_model import load_small_model
from vllm_jetspecpp.models.target_parts import load_target_config
from vllm_jetspecpp.training import recipe
from vllm_jetspecpp.training.blocks import BlockBatch, Shuffle, make_batch, noise_tokens
from vllm_jetspecpp.training.config import AdapterConfig, DecoderConfig, DraftConfig, TrainConfig
from vllm_jetspecpp.training.losses import DISTANCES, masked_mean, state_loss
from vllm_jetspecpp.training.prefix_schedule import clean_prefix_lengths
from vllm_jetspecpp.training.regenerate import read_sequences
from vllm_jetspecpp.training.setup import Setup, default_taps, prepare
from vllm_jetspecpp.training.target_states import (
    LiveStates,
    StateCache,
    TargetStates,
    compute_states,
    open_cache,
    prepare_cache,
)
from vllm_jetspecpp.training.train_adapter import AdapterObjective, Drafter, source_layers
from vllm_jetspecpp.training.train_autoregressive import AutoregressiveObjective
from vllm_jetspecpp.training.train_draft import DraftObjective, mask_token_id
from vllm_jetspecpp.training.train_eagle3 import Eagle3Objective
from vllm_jetspecpp.training.trainer import Progress, learning_rate_factor


def test_taps_are_the_papers() -> None:
    """Qwen3-8B: 1, 9, 17, 25, 33 of 36; and every module is copied from layers it stands for."""
    assert default_taps(36) == [1, 9, 17, 25, 33]
    assert source_layers((1, 7, 14), (1, 2, 3)) == [[1], [4, 7], [9, 12, 14]]


@pytest.mark.parametrize("scale", [1.0, 30.0, 300.0])
@pytest.mark.parametrize("name", DISTANCES)
def test_distances_equal_float64(name: str, scale: float) -> None:
    """Saturated rows included: no NaN, and never below zero by more than rounding."""
    generator = torch.Generator().manual_seed(0)
    p, q = (torch.randn(6, 50, generator=generator, dtype=torch.float64) * scale for _ in "pq")
    log_p, log_q = p.log_softmax(-1), q.log_softmax(-1)
    expected = {
        "forward_kl": (log_p.exp() * (log_p - log_q)).sum(-1),
        "reverse_kl": (log_q.exp() * (log_q - log_p)).sum(-1),
        "cross_entropy": -log_q[torch.arange(6), p.argmax(-1)],
    }[name]
    distance = DISTANCES[name]
    torch.testing.assert_close(distance(p.float(), q.float()).double(), expected, rtol=1e-4, atol=1e-4)
    assert distance(p.float(), p.float() * 1.0).min() > -1e-5
    q32 = q.float().requires_grad_()
    distance(p.float(), q32).sum().backward()
    assert q32.grad is not None and q32.grad.isfinite().all()


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
    make_training_data(folder, folder, 40)
    return folder


def test_answers_are_read_back(work: Path) -> None:
    assert [s.prompt_length for s in read_sequences(work / "answers")] == [4] * 40
    with pytest.raises(FileNotFoundError, match="run `jetspecpp regenerate` first"):
        next(read_sequences(work))


def test_live_states_are_the_cached_ones(work: Path) -> None:
    """A tiny target in float32: bfloat16's rounding of the cache is all that differs."""
    cache = open_cache(work / "states")
    taps = list(SIZES.info(str(work / "target"), work).target_layer_ids)
    live = LiveStates(cache.sequences, TargetStates(str(work / "target"), taps, torch.float32))
    for cached, computed in zip(cache.read([3, 0, 7]), live.read([3, 0, 7]), strict=True):
        rows = cache.sequences.offsets.diff()[[3, 0, 7]]
        for row, count in enumerate(rows.tolist()):
            error = (cached[row, :count].float() - computed[row, :count]).norm() / computed[row, :count].norm()
            assert error < 0.05


def test_states_are_shared_out_and_resumed(work: Path, tmp_path: Path) -> None:
    """Two shards, one of them begun and stopped: the same cache; unfinished, it says so."""
    sequences, target = open_cache(work / "states").sequences, str(work / "target")
    taps = list(SIZES.info(target, work).target_layer_ids)
    prepare_cache(sequences, tmp_path)
    compute_states(target, tmp_path, taps, shard=(1, 2), batch=4)
    with pytest.raises(FileNotFoundError, match="no finished states"):
        open_cache(tmp_path)
    (tmp_path / "done-0of2").write_text("2")  # as if two batches had been done before
    compute_states(target, tmp_path, taps, shard=(0, 2), batch=4)
    again, whole = open_cache(tmp_path), open_cache(work / "states")
    lengths = sequences.offsets.diff()
    missing = lengths.argsort(descending=True, stable=True)[[0, 1, 2, 3, 8, 9, 10, 11]].tolist()
    for s in range(len(sequences)):
        span = slice(int(sequences.offsets[s]), int(sequences.offsets[s + 1]))
        if s in missing:
            assert not again.states[span].any()
        else:
            torch.testing.assert_close(again.states[span], whole.states[span], rtol=0.02, atol=0.02)
    with pytest.raises(ValueError, match="begun with other answers"):
        prepare_cache(replace(sequences, tokens=sequences.tokens + 1), tmp_path)


def test_states_over_blocks_equal_a_forward_of_each(work: Path) -> None:
    """One masked forward over sequence and drafted blocks against a plain forward of every block's own sequence."""
    cache = open_cache(work / "states")
    batch = batch_of(cache)
    taps = list(SIZES.info(str(work / "target"), work).target_layer_ids)
    target = TargetStates(str(work / "target"), taps, torch.float32)
    drafts = torch.randint(0, 64, batch.tokens.shape, generator=torch.Generator().manual_seed(5))
    drafts[..., 0] = batch.tokens[..., 0]
    positions = batch.positions.flatten(1)
    states, final = target.over_blocks(batch.sequence, drafts.flatten(1), positions, batch.mask())
    for row in range(3):
        for a, anchor in enumerate(batch.anchors[row].tolist()):
            tokens = torch.cat([batch.sequence[row, :anchor], drafts[row, a]])[None]
            expected = [x[0, anchor:] for x in target(tokens)]
            torch.testing.assert_close(states[row].view(5, 4, -1)[a], expected[0], rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(final[row].view(5, 4, -1)[a], expected[1], rtol=1e-4, atol=1e-4)


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
                seen = batch.mask(causal=False)[row, a * 4 + i].nonzero().flatten().tolist()
                assert seen == [*range(anchor), *(length + a * 4 + j for j in range(4))]


def test_batches_are_a_function_of_their_number(work: Path) -> None:
    """Every epoch holds every member once; the same number gives the same batch whenever it is asked for."""
    sequences, members = open_cache(work / "states").sequences, list(range(3, 40))
    shuffle = Shuffle(sequences, members, 4, seed=1)
    epochs = [[shuffle(epoch * 10 + i) for i in range(10)] for epoch in range(2)]
    for epoch in epochs:
        assert sorted(m for batch in epoch for m in batch) == members
    assert epochs[0] != epochs[1]
    assert Shuffle(sequences, members, 4, seed=1)(13) == epochs[1][3]
    assert Shuffle(sequences, members, 4, seed=2)(3) != epochs[0][3]


def prepared(work: Path, config: TrainConfig) -> tuple[Setup, StateCache]:
    """The frozen surroundings in float32."""
    cache, target = open_cache(work / "states"), str(work / "target")
    ids = load_file(work / recipe.SHORTLIST)["token_ids"].long()
    cpu = torch.device("cpu")
    return prepare(target, cache.sequences, SIZES.info(target, work), ids, 8, cpu, torch.float32), cache


def steps_on_one_batch(objective: Any, cache: StateCache, count: int) -> list[float]:
    """Losses of a few steps on the same blocks."""
    gen = torch.Generator().manual_seed(3)
    made = objective.make(make_batch(cache, [0, 3, 7], 5, 4, gen), gen)
    optimizer = torch.optim.Adam(objective.parameters(), lr=2e-3)
    losses = []
    for _ in range(count):
        optimizer.zero_grad()
        loss, _ = objective(made)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


DRAFT_OPTIONS: list[dict[str, Any]] = [
    {},
    {"mode": "jetspec"},
    {"mode": "dflash"},
    {"loss": "reverse_kl"},
    {"loss": "cross_entropy"},
    {"initialise": "random"},
]


@pytest.mark.parametrize("options", DRAFT_OPTIONS, ids=str)
def test_a_draft_step_lowers_the_loss(work: Path, options: dict[str, Any]) -> None:
    config = DraftConfig(held_out=8, **options)
    setup, cache = prepared(work, config)
    objective = DraftObjective(setup, cache, config)
    losses = steps_on_one_batch(objective, cache, 4)
    assert all(b < a for a, b in itertools.pairwise(losses))
    figures = objective.validate()
    assert 1 <= figures["tau_J0"] <= 4 and figures["loss"] > 0


@pytest.mark.parametrize("options", [{}, {"decoder_kl": 0.0}, {"draft_share": 1.0}], ids=str)
def test_an_adapter_step_lowers_the_loss(work: Path, options: dict[str, Any]) -> None:
    config = AdapterConfig(held_out=8, **options)
    setup, cache = prepared(work, config)
    taps = list(setup.info.target_layer_ids)
    drafter = Drafter(
        DraftObjective(setup, cache, DraftConfig()), TargetStates(str(work / "target"), taps, setup.dtype)
    )
    objective = AdapterObjective(setup, cache, config, drafter if config.draft_share else None)
    assert {name.split(".")[0] for name, _ in objective.named_parameters()} == {"model"}  # nobody else is trained
    losses = steps_on_one_batch(objective, cache, 4)
    assert all(b < a for a, b in itertools.pairwise(losses))


def test_masked_modes_never_see_a_clean_prefix(work: Path) -> None:
    """DFlash and JetSpec read the anchor and mask tokens; a DFlash position also sees the block's later ones."""
    for mode in ("jetspec", "dflash", "jetspecpp"):
        config = DraftConfig(held_out=8, mode=mode, zero_share=1.0)
        setup, cache = prepared(work, config)
        objective = DraftObjective(setup, cache, config)
        made = objective.make(batch_of(cache), torch.Generator().manual_seed(0))
        if mode != "jetspecpp":
            assert (made.inputs[..., 1:] == mask_token_id(setup.hf_config)).all()
        assert torch.equal(made.inputs[..., 0], made.blocks.tokens[..., 0])
        changed = made.inputs.clone()
        changed[..., 3] = (changed[..., 3] + 1) % 64
        with torch.no_grad():
            before, after = objective.logits(made.blocks, made.inputs), objective.logits(made.blocks, changed)
        same = torch.isclose(before, after, atol=1e-5).all(-1)
        assert same[..., 0].all() == (mode != "dflash")
        assert not same[..., 2].any()


def test_learning_rate_rises_stays_and_falls() -> None:
    config = TrainConfig(steps=100, warmup_steps=10, decay_share=0.2)
    factors = [learning_rate_factor(step, config) for step in range(100)]
    assert factors[0] == pytest.approx(0.1) and factors[9] == 1.0 and set(factors[10:80]) == {1.0}
    assert factors[90] == pytest.approx(0.5) and factors[99] == pytest.approx(0.05)


def test_a_climbing_loss_is_said_early() -> None:
    progress = Progress()
    assert [progress.see({"loss": value}) for value in [2.0] * 5 + [1.0] * 200][-1] is None
    warnings = [w for value in [8.0] * 20 if (w := progress.see({"loss": value}))]
    assert 1 <= len(warnings) < 10 and "--learning-rate" in warnings[0]


def test_bad_training_options() -> None:
    with pytest.raises(ValueError, match=r"mode must be one of .* \(did you mean 'dflash'\?\)"):
        DraftConfig(mode="dflsh")
    with pytest.raises(ValueError, match="zero_share must lie in"):
        DraftConfig(zero_share=1.5)
    with pytest.raises(ValueError, match="initialise must be 'target', 'random' or a file"):
        AdapterConfig(initialise="nowhere.safetensors")


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


def test_layers_per_module_must_fit_the_taps(work: Path) -> None:
    with pytest.raises(ValueError, match=r"layers_per_module must name 1 or 3 numbers \(taps \[1, 3, 5\]\)"):
        replace(SIZES, layers_per_module=(1, 2)).info(str(work / "target"), work)


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
    for weights in ("bf16", "int8"):
        recipe.pack(target, "tiny", work, work / weights, SIZES, weights)
        info = check_checkpoint(work / weights, load_target_config(Path(target)))
        assert (info.block_size, info.draft_vocab_size, info.num_draft_layers) == (4, 64, 1)


def train_rival(work: Path, mode: str, steps: int = 2, **options: Any) -> tuple[Path, list[dict[str, float]]]:
    """A rival trained in a folder of its own beside ``work`` and packed; its folder and record."""
    rival = work.parent / f"rival-{mode}-{len(options)}-{steps}"
    shutil.copytree(work, rival, ignore=shutil.ignore_patterns("draft*", "bf16", "int8", "adapter*"))
    config = replace(CONFIGS["draft"], steps=steps, mode=mode, **options)
    recipe.train_part("draft", str(work / "target"), rival, SIZES, config)
    recipe.pack(str(work / "target"), "tiny", rival, rival / "packed", SIZES)
    return rival / "packed", recipe.read_run(rival, "draft")["record"]


def test_rivals_pack_as_what_they_are(work: Path) -> None:
    """A DFlash draft model says that it is not causal and which token masks; the method refuses to serve it."""
    packed, _ = train_rival(work, "dflash", 1)
    said = json.loads((packed / "config.json").read_text())
    assert said["dflash_config"]["causal"] is False and said["dflash_config"]["mask_token_id"] == 127
    with pytest.raises(ValueError, match=r"manifest.json is missing"):
        check_checkpoint(packed, load_target_config(work / "target"))


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("dflash", {}),
        ("jetspec", {}),
        ("dspark", {"correction_rank": 4}),
        ("domino", {"correction_rank": 4, "gru_size": 8}),
        ("jetspecpp", {"attention": "block", "inputs": "mask", "clean_prefix": True}),
    ],
)
def test_rivals_learn_and_their_engine_drafts_what_training_saw(work: Path, mode: str, options: dict[str, Any]) -> None:
    """After a few steps the loss is lower, and on held-out blocks the engine drafts the objective's own tokens."""
    target = work / "target"
    packed, record = train_rival(work, mode, 30, **options)
    assert record[-1]["loss"] < record[0]["loss"]
    config = replace(CONFIGS["draft"], mode=mode, initialise=str(packed.parent / "draft.safetensors"), **options)
    source = open_cache(work / "states")
    info = SIZES.info(str(target), packed)
    ids = load_file(work / "token_ids.safetensors")["token_ids"].long()
    setup = prepare(str(target), source.sequences, info, ids, 8, torch.device("cpu"), torch.float32)
    objective = DraftObjective(setup, source, config)
    objective.model.to(torch.bfloat16).to(torch.float32)  # packed weights are bfloat16
    batch = make_batch(source, setup.held_out[:4], 3, SIZES.block_size, torch.Generator().manual_seed(0))
    inputs = torch.full_like(batch.tokens, 127)
    inputs[..., 0] = batch.tokens[..., 0]
    engine = ParallelEngine(Rival.load(packed, target, 256, torch.float32), SIZES.block_size - 1, 0)
    with torch.inference_mode():
        hidden = objective.hidden(batch, inputs)
        expected = objective.drafts(hidden, setup.parts.logits(hidden), batch.tokens[..., 0])
        for n, a in itertools.product(range(4), range(3)):
            at = int(batch.anchors[n, a])
            engine.reset()
            engine.tokens = batch.sequence[n, : at + 1].tolist()
            engine.commit(0, batch.context[n, :at].float())
            assert list(engine.draft()) == expected[n, a].tolist()


def test_small_autoregressive_model_is_a_hugging_face_folder(work: Path) -> None:
    """SSD's draft model: the library loads it, and its next token is the trained objective's."""
    packed, record = train_rival(work, "ssd", 20)
    assert record[-1]["loss"] < record[0]["loss"]
    engine = AutoregressiveEngine(
        load_small_model(packed, work / "target", torch.float32), 3, (1, 1, 1, 1), (1, 1, 1, 1)
    )
    assert engine.model.config.num_hidden_layers == SIZES.num_draft_layers
    source, target = open_cache(work / "states"), str(work / "target")
    ids = load_file(work / "token_ids.safetensors")["token_ids"].long()
    setup = prepare(target, source.sequences, SIZES.info(target, packed), ids, 8, torch.device("cpu"), torch.float32)
    setup.parts.embedding = setup.parts.embedding.bfloat16().float()  # all that is packed is
    setup.parts.head = setup.parts.head.bfloat16().float()
    weights = str(packed.parent / "draft.safetensors")
    objective = AutoregressiveObjective(setup, source, replace(CONFIGS["draft"], mode="ssd", initialise=weights))
    objective.model.to(torch.bfloat16).to(torch.float32)
    batch = make_batch(source, setup.held_out[:2], 2, SIZES.block_size, torch.Generator().manual_seed(0))
    with torch.inference_mode():
        logits = objective.logits(batch)
        for n, a in itertools.product(range(2), range(2)):
            at = int(batch.anchors[n, a])
            own = engine.logits(batch.sequence[n, : at + 1].tolist())[-1]
            torch.testing.assert_close(logits[n, a, 0], own[ids], atol=1e-4, rtol=1e-4)


def test_eagle3_learns_by_steps_that_equal_a_loop_over_anchors(work: Path) -> None:
    """Its loss falls, what is packed small comes back, and the unrolled blocks are one sequence after another."""
    packed, record = train_rival(work, "eagle3", 30)
    assert record[-1]["loss"] < 0.96 * record[0]["loss"]
    target, source = work / "target", open_cache(work / "states")
    small, hf_config = packed.parent / "small", load_target_config(work / "target")
    recipe.pack(str(target), "tiny", packed.parent, small, SIZES, delta_of=work)
    ids = load_file(work / "token_ids.safetensors")["token_ids"].long()
    head, token_ids = load_head(small, hf_config)
    assert torch.equal(ids, token_ids)
    assert (small / "model.safetensors").stat().st_size < 0.6 * (packed / "model.safetensors").stat().st_size
    with pytest.raises(ValueError, match="expected a small head"):
        load_head(packed, hf_config)
    hf_config.hidden_size *= 2
    with pytest.raises(ValueError, match="another target's head"):
        load_head(small, hf_config)

    info = SIZES.info(str(target), packed)
    setup = prepare(str(target), source.sequences, info, ids, 8, torch.device("cpu"), torch.float32)
    weights = str(packed.parent / "draft.safetensors")
    objective = Eagle3Objective(setup, source, replace(CONFIGS["draft"], mode="eagle3", initialise=weights))
    for name, value in objective.model.state_dict().items():
        torch.testing.assert_close(head.state_dict()[name], value, atol=float(value.abs().max()) / 200, rtol=0)
    batch = make_batch(source, setup.held_out[:3], 3, SIZES.block_size, torch.Generator().manual_seed(0))
    with torch.inference_mode():
        logits = objective.logits(batch)
        for n, a in itertools.product(range(3), range(3)):
            at, count = int(batch.anchors[n, a]), int(batch.inside[n, a, 1:].sum())
            tokens = torch.cat([batch.sequence[n, :at], batch.tokens[n, a, :count]])
            expected = eagle3_logits(objective.model, setup.parts, batch.context[n, :at].float(), tokens)
            torch.testing.assert_close(logits[n, a, :count], expected, atol=1e-4, rtol=1e-4)


def test_eagle3_needs_three_taps() -> None:
    assert eagle3_taps((1, 7, 14, 21, 27)) == [0, 2, 4]
    with pytest.raises(ValueError, match=r"reads 3 tapped layers, got \[1, 5\]: raise --num-taps"):
        eagle3_taps((1, 5))


def test_rivals_as_differences_from_a_checkpoint(work: Path) -> None:
    """What is packed with ``delta_of`` is smaller, loads by the same call, and has weights close to the full ones."""
    target = work / "target"
    hf_config = load_target_config(target)
    base, _ = train_rival(work, "jetspec", 3)
    for mode in ("dspark", "ssd"):
        full, _ = train_rival(
            work,
            mode,
            4,
            correction_rank=4,
            initialise="target" if mode == "ssd" else str(base.parent / "draft.safetensors"),
        )
        small = full.parent / "small"
        recipe.pack(str(target), "tiny", full.parent, small, SIZES, delta_of=base)
        sizes = [(folder / "model.safetensors").stat().st_size for folder in (full, small)]
        assert sizes[1] < sizes[0] * 0.6
        if mode == "ssd":
            exact, near = (load_small_model(folder, target, torch.float32) for folder in (full, small))
        else:
            exact, near = (
                load_rival(read_rival(folder, hf_config), target, hf_config, torch.float32).draft_model
                for folder in (full, small)
            )
        for (name, a), b in zip(exact.state_dict().items(), near.state_dict().values(), strict=True):
            assert float((a - b).abs().max()) <= 0.05 * float(a.abs().max()) + 0.02, name


def test_decoder_learns_over_the_adapters_predictions(work: Path) -> None:
    """Its loss falls while the adapter stays as it is."""
    target = str(work / "target")
    if not (work / "adapter.safetensors").is_file():
        recipe.train_part("adapter", target, work, SIZES, CONFIGS["adapter"])
    before = load_file(work / "adapter.safetensors")
    config = DecoderConfig(steps=30, learning_rate=3e-3, loss="forward_kl", **OPTIONS)
    recipe.train_part("decoder", target, work, SIZES, config)
    first, last = recipe.read_run(work, "decoder")["record"]
    assert last["kl"] < first["kl"]
    after = load_file(work / "adapter.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_every_prefix_at_once_is_each_prefix_by_itself(work: Path) -> None:
    """Row i of the doubled block is row i of a pass over i - 1 true tokens and noise from there on."""
    source, target = open_cache(work / "states"), str(work / "target")
    ids = load_file(work / "token_ids.safetensors")["token_ids"].long()
    setup = prepare(target, source.sequences, SIZES.info(target, work), ids, 8, torch.device("cpu"), torch.float32)
    config = replace(CONFIGS["draft"], all_prefixes=True, zero_share=0.5, initialise="random")
    objective = DraftObjective(setup, source, config)
    gen = torch.Generator().manual_seed(0)
    batch = make_batch(source, [0, 1, 2], 3, SIZES.block_size, gen)
    noise = noise_tokens(batch, gen)
    noise[..., 0] = batch.tokens[..., 0]
    with torch.inference_mode():
        together = objective.hidden(batch, noise, every_prefix=True)
        for m in range(SIZES.block_size - 1):
            inputs = torch.where(torch.arange(SIZES.block_size) <= m, batch.tokens, noise)
            torch.testing.assert_close(together[:, :, m], objective.hidden(batch, inputs)[:, :, m])
    kinds = [objective.make(batch, gen).every_prefix for _ in range(40)]
    assert 8 < sum(kinds) < 32


def test_dominos_curriculum_starts_with_the_parallel_model(work: Path) -> None:
    """At the start of a run the correction has no gradient, at its end it has."""
    source, target = open_cache(work / "states"), str(work / "target")
    ids = load_file(work / "token_ids.safetensors")["token_ids"].long()
    setup = prepare(target, source.sequences, SIZES.info(target, work), ids, 8, torch.device("cpu"), torch.float32)
    objective = DraftObjective(setup, source, replace(CONFIGS["draft"], mode="domino", correction_rank=4, gru_size=8))
    gen = torch.Generator().manual_seed(0)
    made = objective.make(make_batch(source, [0, 1], 2, SIZES.block_size, gen), gen)
    norms = []
    for progress in (0.0, 0.5, 1.0):
        objective.zero_grad()
        objective.progress = progress
        objective(made)[0].backward()
        grads = [p.grad for p in objective.model.correction.parameters() if p.grad is not None]
        norms.append(sum(float(g.norm()) for g in grads))
    assert norms[0] == 0 < norms[1] < norms[2]
