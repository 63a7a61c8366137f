"""From nothing to a calibrated checkpoint, by the commands a user types: a tiny random target with a real tokenizer."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_models import make_tiny_llama
from vllm_jetspecpp.evaluation.datasets import CALIBRATION, read_prompts
from vllm_jetspecpp.training.regenerate import read_sequences

TARGET = Path(os.environ.get("JETSPECPP_DEMO_TARGET", ".cache/smollm2-135m-instruct"))
SIZES = ["--block-size", "8", "--num-draft-layers", "2", "--num-taps", "3", "--draft-vocab-size", "2048"]
PROMPTS = 96
SHORT = "20"
"""New tokens of an answer: this target soon repeats itself, and a longer answer would count as a loop, not at all."""


def jetspecpp(*arguments: str | Path) -> str:
    """Run the command; its output."""
    command = [sys.executable, "-m", "vllm_jetspecpp.cli", *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, env=environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with SmolLM2's tokenizer, and prompts. Its random layers are weak and its head is its embedding: what it
    says repeats what it read, so that there is something to learn in a minute."""
    folder = tmp_path_factory.mktemp("from-nothing")
    sizes = {"vocab_size": 49_152, "max_position_embeddings": 1024, "eos_token_id": 2}
    target = make_tiny_llama(folder / "target", initializer_range=0.05, tie_word_embeddings=True, **sizes)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json"):
        if (TARGET / name).is_file():
            shutil.copy(TARGET / name, target / name)
    texts = [prompt.turns[0][:200] for prompt in read_prompts(CALIBRATION)]
    lines = [json.dumps({"prompt": f"{number}. {texts[number % len(texts)]}"}) for number in range(PROMPTS)]
    (folder / "prompts.jsonl").write_text("\n".join(lines))
    return folder


@pytest.fixture(scope="module")
def answers(folder: Path) -> Path:
    """The target's answers; half of them by an interrupted run that a second one completes."""
    out, common = folder / "answers", ["--max-tokens", "48", "--part-size", "48"]
    jetspecpp("regenerate", folder / "target", folder / "prompts.jsonl", out, *common, "--seconds", "0")
    assert len(list(out.iterdir())) == 1
    jetspecpp("regenerate", folder / "target", folder / "prompts.jsonl", out, *common)
    return out


def evaluate(folder: Path, *more: str) -> dict[str, Any]:
    options = ["--checkpoint", folder / "checkpoint", "--target", folder / "target", "--bench", "gsm8k", "--limit", "3"]
    shape = ["--max-new-tokens", SHORT, "--num-draft-tokens", "7", "--num-outcomes", "8"]
    return json.loads(jetspecpp("eval", *options, *shape, *more, "--json", "-"))


def test_answers_are_the_targets(folder: Path, answers: Path) -> None:
    """Prompt and greedy answer as token ids, every prompt once."""
    sequences = list(read_sequences(answers))
    assert len(sequences) == PROMPTS
    assert all(1 <= len(s.tokens) - s.prompt_length <= 48 for s in sequences)


def test_training_from_nothing(folder: Path, answers: Path) -> None:
    """Two minutes: states, draft model, adapter, checkpoint, calibration, evaluation. What is trained is foreseen."""
    target, work = folder / "target", folder / "work"
    jetspecpp("train", "states", target, work, answers, *SIZES)
    common = ["--held-out", "8", "--learning-rate", "3e-3", "--anchors", "8", "--validate-every", "1000"]
    for part in ("draft", "adapter"):
        jetspecpp("train", part, target, work, *SIZES, *common, "--steps", "150", "--initialise", "random")
    jetspecpp("train", "pack", target, work, folder / "checkpoint", *SIZES, "--weights", "int8")

    records = {part: json.loads((work / f"{part}.json").read_text())["record"] for part in ("draft", "adapter")}
    assert records["draft"][-1]["tau_J0"] > records["draft"][0]["tau_J0"] + 0.2
    assert records["adapter"][-1]["kl"] < 0.7 * records["adapter"][0]["kl"]

    assert evaluate(folder, "--selection", "uncalibrated")["identical_to_target"] is True
    shape = ["--jacobi", "1", "--refresh", "1", "--num-outcomes", "8", "--num-draft-tokens", "7", "--limit", "12"]
    paths = ["--checkpoint", folder / "checkpoint", "--target", target]
    made = json.loads(jetspecpp("calibrate", *paths, *shape, "--max-new-tokens", SHORT, "--json", "-"))
    assert made["found"][0]["num_draft_tokens"] == 7 and made["found"][0]["rounds"] > 20

    served, bound = evaluate(folder), evaluate(folder, "--states", "true")
    for figures in (served, bound):
        assert figures["identical_to_target"] is True and figures["tau"] > 1.2
        assert 3 <= figures["tokens"] <= 60 and figures["rounds"] > 0
        assert 0 <= figures["hit_rate"] <= 1 and 0 < figures["decoder_top1"] <= 1
    assert set(served["hit_rate_by_cache_size"]) == {"uncalibrated", "calibrated"}


def test_answers_through_ray_data(folder: Path, answers: Path) -> None:
    """One Ray actor answers as this process does."""
    out = folder / "answers-ray"
    options = ["--max-tokens", "48", "--part-size", "16", "--limit", "32", "--workers", "1"]
    jetspecpp("regenerate", folder / "target", folder / "prompts.jsonl", out, *options)
    ours = {tuple(s.tokens[: s.prompt_length].tolist()): s.tokens.tolist() for s in read_sequences(answers)}
    through_ray = list(read_sequences(out))
    assert len(through_ray) == 32
    same = [ours[tuple(s.tokens[: s.prompt_length].tolist())] == s.tokens.tolist() for s in through_ray]
    assert sum(same) >= 24  # the batch's shape may tip a tie of a random model in bfloat16
