"""Checkpoints: what does not fit is refused in one line before any weight is loaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny_checkpoint import make_tiny_checkpoint
from tests.tiny_models import make_tiny_llama
from vllm_jetspecpp.models.checkpoint import check_checkpoint, load_checkpoint, write_manifest
from vllm_jetspecpp.models.target_layers import LayerConfig
from vllm_jetspecpp.models.target_parts import load_target_config, resolve_folder


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("target"))


@pytest.fixture
def checkpoint(target: Path, tmp_path: Path) -> Path:
    make_tiny_checkpoint(target, tmp_path, draft_vocab_size=100)
    return tmp_path


def edit(folder: Path, name: str, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change a JSON file and make the manifest agree with it."""
    config = json.loads((folder / name).read_text())
    change(config)
    (folder / name).write_text(json.dumps(config))
    write_manifest(folder, "tiny")


def test_what_was_saved_is_loaded(target: Path, checkpoint: Path) -> None:
    hf_config = load_target_config(target)
    info = check_checkpoint(checkpoint, hf_config)
    assert (info.target_layer_ids, info.block_size, info.draft_vocab_size) == ((1, 3, 5), 8, 100)
    parts = load_checkpoint(info, LayerConfig.from_hf(hf_config), torch.float32, "cpu")
    assert parts.head_token_ids.shape == (100,)
    assert not any(p.is_meta for p in parts.draft_model.parameters())


def test_a_target_of_the_hub_is_the_revision_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a network, from a cache in the hub's layout."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    repository = tmp_path / "models--owner--tiny"
    for ref, commit in (("main", "a" * 40), ("tested", "b" * 40)):
        (repository / "snapshots" / commit).mkdir(parents=True)
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / ref).write_text(commit)
    for revision, commit in ((None, "a"), ("tested", "b"), ("b" * 40, "b")):
        folder = resolve_folder("owner/tiny", revision, str(tmp_path))
        assert folder == repository / "snapshots" / (commit * 40)
    assert resolve_folder(str(tmp_path), "tested") == tmp_path


BAD: dict[str, tuple[str, Callable[[dict[str, Any]], Any], str]] = {
    "hidden size": ("config.json", lambda c: c.update(hidden_size=32), "hidden_size is 32, the target's is 64"),
    "vocabulary": ("config.json", lambda c: c.update(vocab_size=99), "vocab_size is 99, the target's is 128"),
    "layers": ("config.json", lambda c: c.update(num_target_layers=9), "num_target_layers is 9, the target has 8"),
    "architecture": ("config.json", lambda c: c.update(architectures=["Eagle"]), "architectures must be"),
    "missing key": ("config.json", lambda c: c.pop("block_size"), "key 'block_size' is missing"),
    "taps": ("config.json", lambda c: c["dflash_config"].update(target_layer_ids=[1, 3, 8]), "within 0..7"),
    "causality": ("config.json", lambda c: c.update(is_causal=False), "contradictory causality keys"),
    "bidirectional": ("config.json", lambda c: c["dflash_config"].update(causal=False), "needs a causal draft model"),
    "other taps": ("adapter/config.json", lambda c: c.update(target_layer_ids=[1, 3, 6]), "they must agree"),
    "modules": ("adapter/config.json", lambda c: c.update(layers_per_module=[1]), "1 entries for 3 tapped layers"),
    "version": ("config.json", lambda c: c["jetspecpp"].update(format_version=9), "format_version 9 is not supported"),
}


@pytest.mark.parametrize("case", BAD)
def test_misfit_is_refused(case: str, target: Path, checkpoint: Path) -> None:
    name, change, message = BAD[case]
    edit(checkpoint, name, change)
    with pytest.raises(ValueError, match=message) as error:
        check_checkpoint(checkpoint, load_target_config(target))
    assert "\n" not in str(error.value)


def test_missing_changed_and_foreign_files_are_refused(target: Path, checkpoint: Path) -> None:
    hf_config = load_target_config(target)
    weights = checkpoint / "model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(ValueError, match=r"differs from the manifest \(sha256\)"):
        check_checkpoint(checkpoint, hf_config)
    weights.write_bytes(data[:-1])
    with pytest.raises(ValueError, match="bytes, the manifest says"):
        check_checkpoint(checkpoint, hf_config)
    weights.unlink()
    with pytest.raises(ValueError, match=r"model\.safetensors is missing"):
        check_checkpoint(checkpoint, hf_config)
    weights.write_bytes(data)
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["files"]["../secret"] = {"size": 1, "sha256": ""}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match="names a file outside the checkpoint"):
        check_checkpoint(checkpoint, hf_config)
    (checkpoint / "manifest.json").unlink()
    with pytest.raises(ValueError, match=r"manifest.json is missing"):
        check_checkpoint(checkpoint, hf_config)
    with pytest.raises(ValueError, match="does not exist"):
        check_checkpoint(checkpoint / "nowhere", hf_config)


def test_unsupported_family_is_named(target: Path, checkpoint: Path) -> None:
    hf_config = load_target_config(target)
    hf_config.model_type = "gpt2"
    with pytest.raises(ValueError, match="'gpt2' is not supported; supported: llama, qwen3"):
        check_checkpoint(checkpoint, hf_config)
