"""Anchor replacement, noise and masks against loops."""

from __future__ import annotations

import pytest
import torch

from vllm_jetspecpp.foresight.context_refresh import replace_anchor
from vllm_jetspecpp.foresight.masks import BranchMasks
from vllm_jetspecpp.foresight.noise import noise_positions


def replace_by_loop(block: list[int], likeliest: list[int], fixed: int) -> tuple[list[int], int]:
    for i in range(fixed + 1, len(block)):
        if likeliest[i - 1] != block[i]:
            return [*block[:i], likeliest[i - 1], *block[i + 1 :]], i
    return block, max(fixed, len(block) - 1)


@pytest.mark.parametrize("size", [2, 3, 8, 16])
def test_anchor_replacement_equals_loop(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    blocks = torch.randint(0, 3, (64, size), generator=generator)
    likeliest = torch.where(torch.rand(64, size, generator=generator) < 0.7, blocks.roll(-1, -1), 7)
    fixed = torch.randint(0, size, (64,), generator=generator)
    new, last = replace_anchor(blocks, likeliest, fixed)
    for row in range(64):
        expected = replace_by_loop(blocks[row].tolist(), likeliest[row].tolist(), int(fixed[row]))
        assert (new[row].tolist(), int(last[row])) == expected


def test_agreement_fixes_the_whole_block() -> None:
    block = torch.tensor([[5, 1, 2, 3]])
    new, last = replace_anchor(block, torch.tensor([[1, 2, 3, 9]]), torch.tensor([0]))
    assert (new.tolist(), last.tolist()) == (block.tolist(), [3])


def test_noise_comes_evenly_from_before_the_anchor() -> None:
    """Chi-square over 64 positions, false alarm .001; the same anchor always gives the same noise."""
    from scipy.stats import chisquare

    anchors = torch.arange(64, 4096)
    positions = noise_positions(anchors, 15)
    assert bool((positions >= 0).all()) and bool((positions < anchors[:, None]).all())
    assert torch.equal(positions, noise_positions(anchors, 15))
    buckets = (positions.double() / anchors[:, None] * 64).long().flatten().bincount(minlength=64)
    assert chisquare(buckets.numpy()).pvalue > 0.001
    assert noise_positions(torch.tensor([1]), 3).tolist() == [[0, 0, 0]]


def test_branch_masks_equal_loops() -> None:
    branches, size = 3, 4
    masks = BranchMasks(branches, size, torch.device("cpu"))
    accepted, fixed = torch.tensor([[0, 2, 3]]), torch.tensor([[0, 1, 3]])
    predicted, refreshed, own = masks.predicted(accepted, size)[0], masks.refreshed(fixed)[0], masks.own(fixed)[0]
    for query in range(branches * size):
        b, i = divmod(query, size)
        f = int(fixed[0, b])
        for position in range(size):
            assert bool(predicted[query, position]) == (position <= int(accepted[0, b]))
        for key in range(branches * size):
            c, j = divmod(key, size)
            assert bool(own[query, key]) == (b == c and f <= j <= i)
            assert bool(refreshed[query, key]) == (b == c and j < f)
