"""Weights of a module in a safetensors file, as they are or with matrices in int8.

Eight bits with one scale per output row keep the adapter of a small checkpoint half as large; in memory the weights are
of the draft process's own dtype again.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

SCALE_SUFFIX = "_scale"


def quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[rows, columns] → int8 of the same shape and float32 scales [rows]: weight ≈ int8 * scale, to half a scale."""
    scale = weight.float().abs().amax(dim=1).clamp(min=1e-12) / 127
    return (weight.float() / scale.unsqueeze(1)).round().to(torch.int8), scale


def dequantize_rows(values: Tensor, scale: Tensor) -> Tensor:
    """The float32 matrix that :func:`quantize_rows` stored."""
    return values.float() * scale.unsqueeze(1)


def save_weights(module: nn.Module, path: Path, dtype: torch.dtype) -> None:
    """Write every tensor as ``dtype``; with int8, matrices as int8 and the rest, of little size, as float32."""
    stored: dict[str, Tensor] = {}
    for name, value in module.state_dict().items():
        tensor = value.detach().cpu()
        if dtype is torch.int8 and tensor.ndim == 2:
            stored[name], stored[name + SCALE_SUFFIX] = quantize_rows(tensor)
        else:
            stored[name] = tensor.to(torch.float32 if dtype is torch.int8 else dtype).contiguous()
    save_file(stored, path)


def merge_scales(stored: dict[str, Tensor], path: Path) -> dict[str, Tensor]:
    """``stored`` with int8 matrices and their scales made float32 again; ValueError names ``path``."""
    merged = dict(stored)
    for name, value in stored.items():
        if value.dtype is torch.int8:
            if name + SCALE_SUFFIX not in stored:
                raise ValueError(f"{path}: {name} is int8, but {name + SCALE_SUFFIX} is missing")
            merged[name] = dequantize_rows(value, merged.pop(name + SCALE_SUFFIX))
    return merged


def load_weights(module: nn.Module, path: Path) -> None:
    """Read what :func:`save_weights` wrote into ``module``, whose own tensors may be on the meta device.

    Raises:
        ValueError: tensors are missing or unexpected; the message lists them.
    """
    stored = merge_scales(load_file(path), path)
    missing, unexpected = module.load_state_dict(stored, strict=False, assign=True)
    if missing or unexpected:
        raise ValueError(f"{path}: missing tensors {missing}, unexpected tensors {unexpected}")
