"""Matrix products of the draft process on a CPU: int8 weights in the layout of PyTorch's own int8 kernels.

A round reads every weight several times for a few rows each. PyTorch quantizes the rows as it multiplies (one scale for
all of them); at these shapes that takes about 40 % of the time of a product in bfloat16 (docs/LOG.md). Only drafts
depend on it, never the output.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vllm_jetspecpp.models.weight_files import quantize_rows


def has_int8_products() -> bool:
    """Whether PyTorch has int8 kernels here and the CPU instructions that make them worth it."""
    return "x86" in torch.backends.quantized.supported_engines and bool(torch.cpu.get_capabilities().get("avx512_vnni"))


class PackedLinear(nn.Module):
    """Linear map with int8 weights, one scale for each output; several maps of one input can be joined.

    Args:
        weights: [outputs_i, inputs] each; the outputs are joined in this order.
        biases: [outputs_i] each, all or none of them.
    """

    def __init__(self, weights: Sequence[Tensor], biases: Sequence[Tensor] = ()) -> None:
        super().__init__()
        values, scale = quantize_rows(torch.cat([w.detach().float() for w in weights]))
        zeros = torch.zeros(len(scale), dtype=torch.int64)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # PyTorch means to drop tensors of this type one day
            quantized = torch._make_per_channel_quantized_tensor(values, scale.double(), zeros, 0)
        bias = torch.cat([b.detach().float() for b in biases]) if biases else None
        self._packed = torch.ops.quantized.linear_prepack(quantized, bias)

    @classmethod
    def join(cls, *modules: nn.Linear, columns: Tensor | float = 1.0, rows: Tensor | None = None) -> PackedLinear:
        """Of linear modules that read the same input.

        Args:
            columns: [inputs], what to multiply the columns of all weights with.
            rows: [all outputs], what to multiply outputs with.
        """
        weights = [m.weight.detach().float() * columns for m in modules]
        biases = [m.bias.detach().float() for m in modules if m.bias is not None]
        if rows is not None:
            parts = rows.split([len(w) for w in weights])
            weights = [w * part[:, None] for w, part in zip(weights, parts, strict=True)]
            biases = [bias * part for bias, part in zip(biases, parts, strict=True)] if biases else []
        return cls(weights, biases)

    def forward(self, x: Tensor) -> Tensor:
        """[..., inputs] → [..., outputs] float32."""
        return torch.ops.quantized.linear_dynamic(x.float(), self._packed)


class ReorderedLinear(nn.Module):
    """Linear map without bias in bfloat16, its weight laid out once for oneDNN: half the time of ``nn.Linear`` here.

    Falls back to PyTorch's ordinary product where oneDNN does not have it.
    """

    ROWS = 4
    """That the layout is chosen for: a block's."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self._reordered = linear.weight.detach(), None
        if torch.backends.mkldnn.is_available() and self.weight.dtype == torch.bfloat16:
            self._reordered = torch.ops.mkldnn._reorder_linear_weight(self.weight, self.ROWS)

    def forward(self, x: Tensor) -> Tensor:
        """[..., inputs] → [..., outputs]."""
        if self._reordered is None:
            return F.linear(x, self.weight)
        return torch.ops.mkldnn._linear_pointwise(x, self._reordered, None, "none", [], "")
