"""Weights of a module in a safetensors file, as they are or with matrices in int8.

Eight bits with one scale per output row keep the adapter of a small checkpoint half as large; in memory the weights are
of the draft process's own dtype again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

SCALE_SUFFIX = "_scale"
FLOATS, INT8, INTEGERS = ("F32", "BF16", "F16"), "I8", ("I32", "I64")
"""Dtypes by their names in safetensors files."""


def load_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file; ValueError where it is none."""
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is not a whole safetensors file ({error})") from None


def read_header(path: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of every tensor, without reading any; ValueError where it is not a whole safetensors file."""
    try:
        with safe_open(path, "pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - not a dict
            return {name: (tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()}
    except SafetensorError as error:
        raise ValueError(f"{path} is not a whole safetensors file ({error})") from None


def check_header(path: Path, expected: Mapping[str, tuple[int, ...]], dtypes: Collection[str] = FLOATS) -> None:
    """Compare a file's header with what it must hold, before a tensor is read.

    Args:
        expected: shape by name.
        dtypes: allowed ones; where floats are, a matrix may be in int8 with a scale of its rows.

    Raises:
        ValueError: tensors are missing, unexpected, or of another shape or dtype; one line that names them.
    """
    found = read_header(path)
    scales = {}
    for name, (shape, dtype) in found.items():
        if dtype == INT8 and name in expected and dtypes == FLOATS:
            if name + SCALE_SUFFIX not in found:
                raise ValueError(f"{path}: {name} is int8, but {name + SCALE_SUFFIX} is missing")
            scales[name + SCALE_SUFFIX] = shape[:1]
    whole = {**expected, **scales}
    missing, unexpected = [n for n in whole if n not in found], [n for n in found if n not in whole]
    if missing or unexpected:
        raise ValueError(f"{path}: missing tensors {missing}, unexpected tensors {unexpected}")
    for name, (shape, dtype) in found.items():
        if shape != whole[name]:
            raise ValueError(f"{path}: {name} has shape {list(shape)}, the config says {list(whole[name])}")
        if dtype not in dtypes and name + SCALE_SUFFIX not in scales:
            raise ValueError(f"{path}: {name} is of dtype {dtype}, allowed are {', '.join(dtypes)}")


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
        ValueError: tensors are missing, unexpected, or of another shape or dtype; one line that names them.
    """
    check_header(path, {name: tuple(value.shape) for name, value in module.state_dict().items()})
    module.load_state_dict(merge_scales(load_tensors(path), path), assign=True)
