import math
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from vllm_jetspecpp.demo.near_ties import (
    MARGIN_STEPS,
    Difference,
    Pair,
    bfloat16_step,
    first_difference,
    judge,
    margin_in_steps,
)


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        ([1, 2, 3], [1, 2, 3], None),
        ([], [], None),
        ([1, 2, 3], [1, 9, 3], 1),
        ([1, 2], [1, 2, 3], 2),
        ([4], [], 0),
    ],
)
def test_first_difference(left: list[int], right: list[int], expected: int | None) -> None:
    assert first_difference(left, right) == expected


@pytest.mark.parametrize("value", [0.3, 1.0, 1.99, 15.9, 16.0, 20.0, 31.75, -20.0])
def test_a_step_is_the_distance_to_the_next_bfloat16(value: float) -> None:
    number = torch.tensor(value, dtype=torch.bfloat16)
    away_from_zero = torch.tensor(math.copysign(math.inf, value), dtype=torch.bfloat16)
    assert bfloat16_step(float(number)) == abs(float(torch.nextafter(number, away_from_zero)) - float(number))


def test_the_margin_is_that_of_the_lower_token() -> None:
    logits = torch.tensor([20.0, 19.75, 10.0])
    assert margin_in_steps(logits, (0, 1)) == 2.0
    assert margin_in_steps(logits, (1, 2)) == 80.0


def test_what_counts_as_a_near_tie() -> None:
    assert Difference(3, MARGIN_STEPS).is_near_tie
    assert not Difference(3, MARGIN_STEPS + 0.01).is_near_tie


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    folder = tmp_path_factory.mktemp("target")
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def test_judge_reads_the_target_in_float32_behind_the_common_prefix(target: Path) -> None:
    prompt, common = [1, 2, 3], [4, 5]
    model = LlamaForCausalLM.from_pretrained(target, dtype=torch.float32)
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + common])).logits[0, -1]
    best, worst = int(logits.argmax()), int(logits.argmin())
    pairs = [
        Pair(prompt, [*common, best, 7], [*common, worst, 8]),
        Pair(prompt, common, common),
        Pair(prompt, common, [*common, best]),
    ]
    different, equal, ended = judge(target, pairs)
    assert equal is None
    assert different == Difference(2, pytest.approx(margin_in_steps(logits, (best, worst))))
    assert ended == Difference(2, math.inf) and not ended.is_near_tie


def test_equal_answers_need_no_target() -> None:
    assert judge(Path("/nowhere"), [Pair([1], [2, 3], [2, 3])]) == [None]
