"""A work folder with a tiny target's states, ready to train in."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tiny_training import make_training_data

SIZE_FLAGS = ["--block-size", "4", "--num-draft-layers", "1", "--num-taps", "3", "--draft-vocab-size", "64"]


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``target/`` and ``work/`` over 60 random sequences."""
    folder = tmp_path_factory.mktemp("training")
    make_training_data(folder, folder / "work", 60)
    return folder


@pytest.fixture
def new_work(prepared: Path, tmp_path: Path) -> Callable[[str], Path]:
    """Makes copies of the work folder, by name."""

    def make(name: str) -> Path:
        return Path(shutil.copytree(prepared / "work", tmp_path / name))

    return make
