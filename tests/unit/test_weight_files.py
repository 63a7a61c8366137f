"""Weights in eight bits: how exact, how large, and what a broken file says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from vllm_jetspecpp.models.weight_delta import decode_deltas, encode_deltas, pack_delta, unpack_delta
from vllm_jetspecpp.models.weight_files import dequantize_rows, load_weights, quantize_rows, save_weights


def test_rows_come_back_to_half_a_scale() -> None:
    weight = torch.randn(40, 64, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 3, 40)[:, None]
    weight[7] = 0
    values, scale = quantize_rows(weight)
    error = (dequantize_rows(values, scale) - weight).abs()
    assert values.dtype is torch.int8 and (error <= scale[:, None] * 0.5001).all()
    assert not dequantize_rows(values, scale)[7].any()


def module() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(64, 32), nn.LayerNorm(32))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 0), (torch.bfloat16, 4e-3), (torch.int8, 4e-3)])
def test_modules_are_stored_and_read(tmp_path: Path, dtype: torch.dtype, tolerance: float) -> None:
    """Matrices within the dtype's rounding of their row's largest value; in int8 vectors stay float32."""
    path, whole = tmp_path / "w.safetensors", module()
    save_weights(whole, path, dtype)
    with torch.device("meta"):
        read = nn.Sequential(nn.Linear(64, 32), nn.LayerNorm(32))
    load_weights(read, path)
    for name, value in whole.state_dict().items():
        largest = value.abs().amax() if value.ndim == 1 else value.abs().amax(1, keepdim=True)
        error = ((read.state_dict()[name].float() - value).abs() / largest.clamp(min=1e-9)).max()
        assert error <= (0 if dtype is torch.int8 and value.ndim == 1 else tolerance)


def test_int8_is_half_of_bfloat16(tmp_path: Path) -> None:
    layer = nn.Linear(512, 512, bias=False)
    sizes = []
    for dtype in (torch.bfloat16, torch.int8):
        save_weights(layer, tmp_path / "w.safetensors", dtype)
        sizes.append((tmp_path / "w.safetensors").stat().st_size)
    assert sizes[1] < 0.51 * sizes[0]


def test_missing_tensors_are_named(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    save_weights(module(), path, torch.int8)
    stored = load_file(path)
    save_file({k: v for k, v in stored.items() if k != "0.weight_scale"}, path)
    with pytest.raises(ValueError, match=r"0\.weight is int8, but 0\.weight_scale is missing"):
        load_weights(module(), path)
    save_file({k: v for k, v in stored.items() if k != "1.bias"}, path)
    with pytest.raises(ValueError, match=r"missing tensors \['1\.bias'\]"):
        load_weights(module(), path)


@pytest.mark.parametrize(("bits", "distortion"), [(2, 0.1175), (4, 0.0095)])
@pytest.mark.parametrize(("rows", "columns"), [(3, 8), (5, 7), (1, 1), (40, 333)])
def test_deltas_in_few_bits(rows: int, columns: int, bits: int, distortion: float) -> None:
    """Codes take so many bits a number, and a normal matrix comes back with the quantiser's own error."""
    generator = torch.Generator().manual_seed(rows)
    delta = torch.randn(rows, columns, generator=generator) * torch.rand(rows, 1, generator=generator)
    codes, deviation = pack_delta(delta, bits)
    assert codes.shape == (rows, -(-columns * bits // 8)) and codes.dtype is torch.uint8
    back = unpack_delta(codes, deviation, columns, bits)
    assert back.shape == delta.shape and bool((back.sign() == delta.sign()).all())
    if rows == 40:
        error = ((back - delta).square().mean(1) / deviation.square()).mean()
        assert error == pytest.approx(distortion, rel=0.1)
    assert bool((unpack_delta(*pack_delta(torch.zeros(rows, columns), bits), columns, bits).abs() < 1e-9).all())


def test_deltas_of_a_model() -> None:
    """Matrices with a base become differences, others int8, vectors stay; maps of integers too."""
    base = {"a": torch.randn(6, 8), "n": torch.ones(8)}
    tensors = {"a": base["a"] + 0.01, "b": torch.randn(4, 8), "n": torch.full((8,), 2.0), "d2t": torch.arange(5)}
    stored = encode_deltas(tensors, base)
    assert set(stored) == {"a_delta", "a_deviation", "b", "b_scale", "n", "d2t"}
    back = decode_deltas(stored, base)
    assert set(back) == {"a", "b", "b_scale", "n", "d2t"}
    torch.testing.assert_close(back["a"], tensors["a"], atol=0.01, rtol=0)
    assert torch.equal(back["d2t"], tensors["d2t"])
    with pytest.raises(KeyError):
        decode_deltas(stored, {})
