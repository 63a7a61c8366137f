"""Even out the columns of int8 products: what is large in the inputs is moved into the weights (SmoothQuant).

Some channels of a transformer's states are tens of times as large as the rest, whatever the text. With one scale for
all of an input's channels the small ones would drown. Which channels, the networks show by themselves when they run
over any tokens, once at start: no data is needed, and every start finds the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

ALPHA = 0.5
"""Share of a column's spread that moves into the weights."""
SMALLEST = 1e-5


class LargestInputs:
    """Largest magnitude of every input channel of linear modules, over all they have seen while watched."""

    def __init__(self) -> None:
        self._seen: dict[nn.Module, Tensor] = {}

    @contextmanager
    def watching(self, root: nn.Module) -> Iterator[None]:
        """Watch every linear module in ``root``."""
        hooks = [m.register_forward_pre_hook(self._look) for m in root.modules() if isinstance(m, nn.Linear)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _look(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        largest = inputs[0].detach().float().abs().flatten(0, -2).amax(0)
        self._seen[module] = torch.maximum(self._seen.get(module, largest), largest)

    def __getitem__(self, module: nn.Module) -> Tensor | None:
        """[inputs] of a module; None of one that saw nothing."""
        return self._seen.get(module)


def smoothing(largest: Tensor | None, *weights: Tensor) -> Tensor:
    """What to divide the inputs by and to multiply the columns of ``weights`` [outputs, inputs] with; [inputs]."""
    columns = torch.cat([w.detach().float().abs() for w in weights]).amax(0).clamp(min=SMALLEST)
    if largest is None:
        return torch.ones_like(columns)
    return (largest.clamp(min=SMALLEST) ** ALPHA / columns ** (1 - ALPHA)).clamp(min=SMALLEST)
