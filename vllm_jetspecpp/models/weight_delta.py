"""Weights as differences of two or four bits from other weights: how rivals that grew out of a model stay small in git.

A fine-tuned matrix differs little from where it started: four levels a number and one deviation a row keep the held-out
acceptance length within noise. Where training went far, as SSD's model does from the target's layers, two bits cost a
tenth of it and sixteen levels do not (docs/LOG.md).
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_jetspecpp.models.weight_files import SCALE_SUFFIX, quantize_rows

DELTA, DEVIATION = {2: "_delta", 4: "_delta4"}, "_deviation"
POSITIVE = {2: (0.4528, 1.51), 4: (0.1284, 0.3881, 0.6568, 0.9424, 1.2562, 1.6181, 2.069, 2.7326)}
"""Positive levels in standard deviations by bits: the best for a normal distribution (Lloyd-Max). Edges lie halfway."""


def _levels(bits: int) -> Tensor:
    positive = torch.tensor(POSITIVE[bits])
    return torch.cat([-positive.flip(0), positive])


def _shifts(bits: int) -> Tensor:
    return torch.arange(0, 8, bits, dtype=torch.uint8)


def pack_delta(delta: Tensor, bits: int = 2) -> tuple[Tensor, Tensor]:
    """[rows, columns] → codes [rows, ⌈columns * bits / 8⌉] uint8 and deviations [rows] float32."""
    deviation = delta.float().square().mean(dim=1).sqrt().clamp(min=1e-12)
    levels = _levels(bits)
    codes = torch.bucketize(delta.float() / deviation.unsqueeze(1), (levels[1:] + levels[:-1]) / 2).to(torch.uint8)
    codes = torch.nn.functional.pad(codes, (0, -codes.shape[1] % (8 // bits))).view(len(codes), -1, 8 // bits)
    return (codes << _shifts(bits)).sum(-1, dtype=torch.uint8), deviation


def unpack_delta(codes: Tensor, deviation: Tensor, columns: int, bits: int = 2) -> Tensor:
    """The differences that :func:`pack_delta` stored, [rows, columns] float32."""
    parts = (codes.unsqueeze(-1) >> _shifts(bits)) & (2**bits - 1)
    return _levels(bits)[parts.flatten(1)[:, :columns].long()] * deviation.unsqueeze(1)


def encode_deltas(tensors: dict[str, Tensor], base: dict[str, Tensor], bits: int = 2) -> dict[str, Tensor]:
    """Matrices that ``base`` has too as differences, other matrices in int8, the rest in bfloat16."""
    stored: dict[str, Tensor] = {}
    for name, value in tensors.items():
        if not value.is_floating_point() or value.ndim != 2:
            stored[name] = value.bfloat16() if value.is_floating_point() else value
        elif name in base:
            difference = value.float() - base[name].float()
            stored[name + DELTA[bits]], stored[name + DEVIATION] = pack_delta(difference, bits)
        else:
            stored[name], stored[name + SCALE_SUFFIX] = quantize_rows(value)
    return {name: value.contiguous() for name, value in stored.items()}


def decode_deltas(stored: dict[str, Tensor], base: dict[str, Tensor]) -> dict[str, Tensor]:
    """The other way round, but for int8 matrices, which stay; a tensor that ``base`` lacks is a KeyError."""
    endings = (*DELTA.values(), DEVIATION)
    tensors = {name: value for name, value in stored.items() if not name.endswith(endings)}
    for bits, ending in DELTA.items():
        for name, codes in stored.items():
            if name.endswith(ending):
                own = name.removesuffix(ending)
                start = base[own].float()
                tensors[own] = start + unpack_delta(codes, stored[own + DEVIATION], start.shape[1], bits)
    return tensors
