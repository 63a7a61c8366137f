"""A work folder with a tiny target's states, ready to train in."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.tiny_models import make_tiny_llama
from vllm_jetspecpp.training import recipe
from vllm_jetspecpp.training.regenerate import Sequence, _save

SIZES = recipe.Sizes(block_size=4, num_draft_layers=1, num_taps=3, layers_per_module=(1,), draft_vocab_size=64)
SIZE_FLAGS = ["--block-size", "4", "--num-draft-layers", "1", "--num-taps", "3", "--draft-vocab-size", "64"]


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``target/`` and ``work/`` over 60 random sequences."""
    folder = tmp_path_factory.mktemp("training")
    target = make_tiny_llama(folder / "target")
    gen = torch.Generator().manual_seed(0)
    lengths = torch.randint(12, 40, (60,), generator=gen).tolist()
    sequences = [Sequence(torch.randint(0, 64, (n,), generator=gen, dtype=torch.int32), 4) for n in lengths]
    (folder / "answers").mkdir()
    _save(folder / "answers/shard-0of1-00000.safetensors", sequences)
    recipe.begin(str(target), folder / "answers", folder / "work", SIZES)
    recipe.states(str(target), folder / "work", SIZES)
    return folder


@pytest.fixture
def new_work(prepared: Path, tmp_path: Path) -> Callable[[str], Path]:
    """Makes copies of the work folder, by name."""

    def make(name: str) -> Path:
        return Path(shutil.copytree(prepared / "work", tmp_path / name))

    return make
