"""A tiny target and its states over random sequences: what a training run starts from."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.tiny_models import make_tiny_llama
from vllm_jetspecpp.training import recipe
from vllm_jetspecpp.training.regenerate import Sequence, _save

SIZES = recipe.Sizes(block_size=4, num_draft_layers=1, num_taps=3, layers_per_module=(1,), draft_vocab_size=64)


def make_training_data(folder: Path, work: Path, count: int) -> None:
    """``folder/target`` and ``folder/answers``, ``count`` sequences long, and their states in ``work``."""
    target = make_tiny_llama(folder / "target")
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(12, 40, (count,), generator=generator).tolist()
    # Half the vocabulary, so that a shortlist of that size covers it.
    sequences = [Sequence(torch.randint(0, 64, (n,), generator=generator, dtype=torch.int32), 4) for n in lengths]
    (folder / "answers").mkdir()
    _save(folder / "answers/shard-0of1-00000.safetensors", sequences)
    recipe.begin(str(target), folder / "answers", work, SIZES)
    recipe.states(str(target), work, SIZES)
