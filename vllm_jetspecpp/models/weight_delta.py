"""Weights as two-bit differences from other weights: how rivals that grew out of one draft model stay small in git.

A fine-tuned matrix differs little from where it started, so four levels a number and one deviation a row are enough:
the held-out acceptance length of such a rival is that of its full weights within noise (docs/LOG.md).
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_jetspecpp.models.weight_files import SCALE_SUFFIX, quantize_rows

DELTA, DEVIATION = "_delta", "_deviation"
LEVELS = (-1.51, -0.4528, 0.4528, 1.51)
"""In standard deviations: the best four for a normal distribution (Lloyd-Max); 0 and ±.98 part them."""
EDGES = (-0.9816, 0.0, 0.9816)


def pack_delta(delta: Tensor) -> tuple[Tensor, Tensor]:
    """[rows, columns] → codes [rows, ⌈columns / 4⌉] uint8, four to a byte, and deviations [rows] float32."""
    deviation = delta.float().square().mean(dim=1).sqrt().clamp(min=1e-12)
    codes = torch.bucketize(delta.float() / deviation.unsqueeze(1), torch.tensor(EDGES)).to(torch.uint8)
    codes = torch.nn.functional.pad(codes, (0, -codes.shape[1] % 4)).view(len(codes), -1, 4)
    return (codes << torch.tensor([0, 2, 4, 6], dtype=torch.uint8)).sum(-1, dtype=torch.uint8), deviation


def unpack_delta(codes: Tensor, deviation: Tensor, columns: int) -> Tensor:
    """The differences that :func:`pack_delta` stored, [rows, columns] float32."""
    parts = (codes.unsqueeze(-1) >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8)) & 3
    return torch.tensor(LEVELS)[parts.flatten(1)[:, :columns].long()] * deviation.unsqueeze(1)


def encode_deltas(tensors: dict[str, Tensor], base: dict[str, Tensor]) -> dict[str, Tensor]:
    """Matrices that ``base`` has too as differences, other matrices in int8, the rest in bfloat16."""
    stored: dict[str, Tensor] = {}
    for name, value in tensors.items():
        if not value.is_floating_point() or value.ndim != 2:
            stored[name] = value.bfloat16() if value.is_floating_point() else value
        elif name in base:
            stored[name + DELTA], stored[name + DEVIATION] = pack_delta(value.float() - base[name].float())
        else:
            stored[name], stored[name + SCALE_SUFFIX] = quantize_rows(value)
    return {name: value.contiguous() for name, value in stored.items()}


def decode_deltas(stored: dict[str, Tensor], base: dict[str, Tensor]) -> dict[str, Tensor]:
    """The other way round, but for int8 matrices, which stay; a tensor that ``base`` lacks is a KeyError."""
    tensors = {name: value for name, value in stored.items() if not name.endswith((DELTA, DEVIATION))}
    for name, codes in stored.items():
        if name.endswith(DELTA):
            own = name.removesuffix(DELTA)
            start = base[own].float()
            tensors[own] = start + unpack_delta(codes, stored[own + DEVIATION], start.shape[1])
    return tensors
