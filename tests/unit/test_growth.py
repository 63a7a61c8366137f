"""The cost of a round by counted work: seconds would depend on the machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny_round import Tiny, make_tiny
from vllm_jetspecpp.config import EngineConfig, RoundConfig
from vllm_jetspecpp.models.networks import load_networks


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    yield


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny("llama", tmp_path_factory.mktemp("growth"))


@pytest.fixture(scope="module")
def counted(tiny: Tiny) -> Callable[..., dict[str, int]]:
    """Counts a round of the tiny engine at sizes by their names."""
    config = EngineConfig(str(tiny.target), str(tiny.checkpoint), RoundConfig(7), 1, 1024, "float32")
    nets, _ = load_networks(config)

    def count(hit: bool = False, **sizes: Any) -> dict[str, int]:
        from growth_rounds import Point, Rounds

        return Rounds(nets, Point(**sizes), None, torch.float32).counts(hit)

    return count


@pytest.mark.parametrize("hit", [True, False])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_round_grows_linearly_with_the_context(counted: Callable[..., dict[str, int]], batch: int, hit: bool) -> None:
    """Twice the way costs at most twice as much more, to the FLOP and to the byte; of FLOPs it does cost more."""
    counts = [counted(hit, context=context, batch=batch) for context in (256, 512, 1024)]
    for what in ("flops", "bytes"):
        small, middle, large = (count[what] for count in counts)
        assert 0 < small < middle
        assert large - middle <= 2 * (middle - small), what


def test_a_window_stops_the_growth(counted: Callable[..., dict[str, int]]) -> None:
    counts = [counted(context=context, window=128) for context in (512, 1024)]
    assert counts[0]["flops"] == counts[1]["flops"] > 0


@pytest.mark.parametrize(("field", "sizes"), [("batch", (1, 2, 4)), ("num_outcomes", (2, 4, 8))])
def test_a_round_grows_linearly_with_batch_and_outcomes(
    counted: Callable[..., dict[str, int]], field: str, sizes: tuple[int, ...]
) -> None:
    """Matrix products but for the branches' attention to each other, which stand in one sequence and are masked."""
    small, middle, large = (counted(context=256, **{field: size})["flops"] for size in sizes)
    assert small < middle
    assert large - middle <= (2 if field == "batch" else 2.6) * (middle - small)


def test_the_counter_sees_a_square(tiny: Tiny) -> None:
    """The target's own forward over a whole sequence, which a round never runs."""
    from growth_rounds import Counter
    from torch.utils.flop_counter import FlopCounterMode

    found = []
    for length in (128, 256, 512):
        flops, made = FlopCounterMode(display=False), Counter()
        with torch.inference_mode(), made, flops:
            x = torch.zeros(length, 64)
            (x @ x.T) @ x
        found.append((flops.get_total_flops(), made.bytes))
    for small, middle, large in zip(*found, strict=True):
        assert large - middle > 3 * (middle - small)


def test_exponents() -> None:
    """Fixed costs do not hide a power, noise widens the interval around it, and what stands still has none."""
    from growth_fit import fit

    sizes = [128, 512, 2048, 8192]
    for power in (0.5, 1.0, 2.0):
        exact = fit(sizes, [[5.0 + 1e-3 * (size - 128) ** power] * 3 for size in sizes])
        assert exact.value == pytest.approx(power) and exact.tail == pytest.approx(power)
        assert exact.low == pytest.approx(power) and exact.high == pytest.approx(power)
    generator = torch.Generator().manual_seed(0)
    noise = (1 + 0.05 * torch.randn(4, 15, generator=generator)).tolist()
    noisy = fit(sizes, [[(5 + 1e-2 * size) * n for n in row] for size, row in zip(sizes, noise, strict=True)])
    assert 0.7 < noisy.low < noisy.value < noisy.high < 1.3 and noisy.high - noisy.low > 0.01
    assert str(fit(sizes, [[5.0]] * 4)) == "–"
    # A square that a linear part hides at first shows between the last two.
    late = fit(sizes, [[1e-3 * size + 1e-6 * size**2] for size in sizes])
    assert late.tail > 1.5 and late.tail > late.value


def test_what_counts_as_a_square() -> None:
    from growth import dearer, squares
    from growth_fit import Exponent

    linear, square = Exponent(1.02, 0.9, 1.25, 1.1), Exponent(1.8, 1.7, 1.9, 1.95)
    assert (
        squares({"context": {"work": linear, "flops": Exponent(1.0, 1.0, 1.0, 1.0)}, "batch": {"work": square}}) == []
    )
    assert squares({"context": {"work": square, "bytes": linear}}) == ["work (context): 1.80 (1.70 to 1.90)"]
    assert len(squares({"context, window": {"bytes": square}})) == 1
    assert dearer({"context": {"work": linear, "answer_miss": square, "bytes": square}}) == [
        "answer_miss (context), 1.95"
    ]
