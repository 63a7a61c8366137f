"""A tiny target with a random checkpoint, and what tests of the round do with it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from tests.tiny_checkpoint import make_tiny_checkpoint
from tests.tiny_models import make_tiny_llama, make_tiny_qwen3
from vllm_jetspecpp.config import EngineConfig, RoundConfig
from vllm_jetspecpp.models.networks import Networks, load_networks
from vllm_jetspecpp.runtime.draft_engine import DraftEngine
from vllm_jetspecpp.runtime.offline import OfflineTarget

MAKERS = {"llama": make_tiny_llama, "qwen3": make_tiny_qwen3}
TAPS = (1, 3, 5)


@dataclass
class Tiny:
    """A target, a checkpoint for it, and what tests do with them."""

    target: Path
    checkpoint: Path
    model: Any

    def config(self, round_config: RoundConfig, num_slots: int = 4) -> EngineConfig:
        return EngineConfig(str(self.target), str(self.checkpoint), round_config, num_slots, 256, "float32")

    def engine(self, round_config: RoundConfig, num_slots: int = 4) -> DraftEngine:
        return DraftEngine(self.config(round_config, num_slots))

    def networks(self, round_config: RoundConfig) -> Networks:
        return load_networks(self.config(round_config))[0]

    def offline(self) -> OfflineTarget:
        return OfflineTarget(self.model, TAPS)

    @torch.inference_mode()
    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """The target's own greedy continuation, the whole sequence anew for every token."""
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self.model(torch.tensor([tokens])).logits[0, -1].argmax()))
        return tokens[len(prompt) :]

    @torch.inference_mode()
    def states(self, tokens: list[int]) -> torch.Tensor:
        """True tapped states of ``tokens``: [len(tokens), taps * hidden]."""
        hidden = self.model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        return torch.cat([hidden[tap + 1][0] for tap in TAPS], -1)


def make_tiny(family: str, folder: Path) -> Tiny:
    """A target of ``family`` with a checkpoint whose adapter is the target's own layers."""
    target = MAKERS[family](folder / "target")
    checkpoint = folder / "checkpoint"
    make_tiny_checkpoint(target, checkpoint, taps=TAPS, draft_vocab_size=100, copy_adapter=True)
    return Tiny(target, checkpoint, AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32))


def random_tokens(count: int, seed: int, vocab: int = 128) -> list[int]:
    """Token ids from a fixed seed."""
    return torch.randint(0, vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.inference_mode()
def third_token_distribution(tiny: Tiny, prompt: list[int]) -> torch.Tensor:
    """Σ p(t₁) p(t₂ | t₁) p(· | t₁ t₂) over all pairs, [128] float64: all 16,384 continuations, in batches."""
    vocab = torch.arange(128)
    start = torch.tensor(prompt)

    def after(suffixes: torch.Tensor) -> torch.Tensor:
        tokens = torch.cat([start.expand(len(suffixes), -1), suffixes], dim=1)
        logits = [tiny.model(part).logits[:, -1] for part in tokens.split(2048)]
        return torch.cat(logits).double().softmax(-1)

    first = after(torch.zeros(1, 0, dtype=torch.int64))[0]
    second = after(vocab[:, None])
    third = after(torch.cartesian_prod(vocab, vocab)).view(128, 128, 128)
    return torch.einsum("a,ab,abc->c", first, second, third)


def follows_the_target(tiny: Tiny, prompt: list[int], seen: Counter[int], count: int) -> bool:
    """Chi-square test of third tokens ``seen`` after ``prompt`` against the exact distribution. False alarm: .001."""
    from scipy.stats import chisquare

    third = third_token_distribution(tiny, prompt)
    order = third.argsort(descending=True)
    groups = order.split([1] * 8 + [8] * 5 + [128 - 48])  # rare tokens together, or their expected counts are too small
    observed = [sum(seen[int(t)] for t in group) for group in groups]
    expected = torch.tensor([float(third[group].sum()) for group in groups], dtype=torch.float64)
    return bool(chisquare(observed, (expected / expected.sum() * count).numpy()).pvalue > 0.001)
