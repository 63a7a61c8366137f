"""What training for a target costs, from counted FLOPs and bytes: ``python benchmarks/training_cost.py [--json -]``.

Counts matrix products only (2 FLOPs a weight and token; a backward pass costs twice its forward, once where only
activations need gradients). Attention scores, norms and softmaxes are left out: at these lengths they are under a
tenth. Rates of machines are assumptions named in the table, not measurements.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Target:
    """Sizes that count."""

    name: str
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    vocab: int

    @property
    def layer(self) -> int:
        """Weights of a decoder layer."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return attention + 3 * self.hidden * self.intermediate

    @property
    def body(self) -> int:
        """Weights that every token runs through, without the LM head."""
        return self.layer * self.layers


@dataclass(frozen=True)
class Plan:
    """A training run."""

    tokens: float  # of answers and prompts
    draft_layers: int
    adapter_layers: int
    draft_steps: int
    adapter_steps: int
    sequences: int  # a step, over all processes
    length: int
    anchors: int
    block: int
    draft_vocab: int
    taps: int = 5


SMOLLM2 = Target("SmolLM2-135M", 576, 1536, 9, 3, 64, 30, 49_152)
QWEN3_8B = Target("Qwen3-8B", 4096, 12_288, 32, 8, 128, 36, 151_936)
# The paper's 27B target is a hybrid; its linear-attention layers are counted as dense ones of the same width.
DENSE_27B = Target("27B (as dense)", 5120, 17_408, 24, 4, 256, 64, 248_320)

HERE = Plan(1.83e6, 3, 10, 7000, 3600, 4, 290, 16, 16, 8192)
LARGE = Plan(5e8, 5, 10, 40_000, 40_000, 64, 1024, 64, 16, 32_768)


def cost(target: Target, plan: Plan) -> dict[str, float]:
    """FLOPs by stage, bytes on disk and in memory."""
    rows = plan.sequences * plan.anchors * plan.block  # block positions a step
    context = plan.sequences * plan.length
    head = target.hidden * plan.draft_vocab
    keys_values = 2 * target.hidden * target.kv_heads * target.head_dim
    draft, adapter, decoder = (n * target.layer for n in (plan.draft_layers, plan.adapter_layers, 2))
    fuse = plan.taps * target.hidden**2
    heads = 3 * rows * head  # the target's distribution, the network's own, and back to its states
    draft_step = 2 * (3 * (rows * draft + context * (plan.draft_layers * keys_values + fuse)) + heads)
    adapter_step = 2 * (3 * (rows * adapter + context * plan.adapter_layers * keys_values) + heads)
    adapter_step += 2 * (2 * rows + context) * decoder  # frozen
    trained = max(draft + fuse, adapter)
    return {
        "answers_flops": 2 * plan.tokens * (target.body + target.hidden * target.vocab),
        "states_flops": 2 * plan.tokens * target.body,
        "draft_flops": plan.draft_steps * draft_step,
        "adapter_flops": plan.adapter_steps * adapter_step,
        "states_bytes": plan.tokens * 2 * target.hidden * (plan.taps + 1),
        # float32 weights, gradients and two moments; the target's pieces in bfloat16
        "memory_bytes": 16 * trained + 2 * (decoder + 2 * target.hidden * target.vocab),
    }


def report(target: Target, plan: Plan, flops_per_second: float, where: str) -> dict[str, Any]:
    """Figures of one target for people: hours at an assumed rate."""
    figures = cost(target, plan)
    hours = {name.removesuffix("_flops"): v / flops_per_second / 3600 for name, v in figures.items() if "flops" in name}
    return {
        "target": target.name,
        "tokens": plan.tokens,
        "assumed": where,
        "hours": {name: float(f"{value:.2g}") for name, value in hours.items()},
        "states_gigabytes": round(figures["states_bytes"] / 1e9, 1),
        "memory_gigabytes": round(figures["memory_bytes"] / 1e9, 1),
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Counted cost of training for three targets.")
    parser.add_argument("--json", metavar="FILE", help="write JSON; - is standard output")
    args = parser.parse_args()
    gpus = "8 GPUs at 400 TFLOP/s each"
    rows = [
        report(SMOLLM2, HERE, 1.2e11, "one CPU core at 120 GFLOP/s"),
        report(QWEN3_8B, LARGE, 3.2e15, gpus),
        report(DENSE_27B, LARGE, 3.2e15, gpus),
    ]
    if args.json:
        text = json.dumps(rows, indent=2)
        if args.json == "-":
            print(text)
        else:
            Path(args.json).write_text(text + "\n")
        return
    print("| target | tokens | assumed | answers, h | states, h | draft, h | adapter, h | states, GB | memory, GB |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for row in rows:
        hours = " | ".join(f"{row['hours'][part]:g}" for part in ("answers", "states", "draft", "adapter"))
        sizes = f"{row['states_gigabytes']:g} | {row['memory_gigabytes']:g}"
        print(f"| {row['target']} | {row['tokens']:.3g} | {row['assumed']} | {hours} | {sizes} |")


if __name__ == "__main__":
    main()
