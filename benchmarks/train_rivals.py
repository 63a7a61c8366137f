"""Trains what JetSpec++ is compared with: the rivals, the ablations of its draft model, and the fine-tuned decoder.

::

    python benchmarks/train_rivals.py dflash jetspec dspark domino ssd eagle3 --work WORK \\
        --initialise WORK/draft.safetensors
    python benchmarks/train_rivals.py --ablations --work WORK

WORK is a folder that ``jetspecpp regenerate`` and ``jetspecpp train states`` have filled (docs/training.md). A model
goes to ``--out`` (``.cache/rivals``), in its method's own format; those that come with the repository are small:
differences from its checkpoint, eagle3's in int8 (``--out checkpoints/rivals --delta-of
checkpoints/smollm2-135m-instruct``). A model that is there already is not trained again, and a run that was stopped
goes on.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

RIVALS = {
    "dflash": ["--mode", "dflash"],
    "jetspec": ["--mode", "jetspec"],
    "dspark": ["--mode", "dspark", "--correction-rank", "64"],
    "domino": ["--mode", "domino", "--correction-rank", "64"],
    # Not a rival: our draft model, going on as long as they did, with every clean prefix taught at once.
    "every-prefix": ["--mode", "jetspecpp", "--all-prefixes", "--zero-share", "0.5"],
    # No other method's weights can start an autoregressive model, so it gets more steps and a higher rate.
    "ssd": ["--mode", "ssd", "--steps", "3000", "--learning-rate", "1e-3", "--initialise", "target"],
    # A head of one layer starts from nothing (the target's layers only mislead it at first), with half the block for
    # twice the anchors, since vLLM's eagle3 drafts a few tokens.
    "eagle3": [
        *("--mode", "eagle3", "--steps", "1800", "--learning-rate", "1e-3", "--initialise", "random"),
        *("--block-size", "8", "--anchors", "32"),
    ],
}
ABLATIONS = {
    "ours": ["--mode", "jetspecpp"],
    "noise-noised": ["--mode", "jetspecpp", "--zero-share", "1"],
    "mask-prefix": ["--mode", "jetspecpp", "--inputs", "mask", "--clean-prefix"],
    "mask-noised": ["--mode", "jetspec"],
    "reverse-kl": ["--mode", "jetspecpp", "--loss", "reverse_kl"],
    "cross-entropy": ["--mode", "jetspecpp", "--loss", "cross_entropy"],
    "bidirectional": ["--mode", "jetspecpp", "--attention", "block"],
}
COMMON = ["--zero-share", "0.65", "--position-decay", "0.8", "--decay-share", "0.45", "--seed", "7"]
SIZES = {"rivals": ["--num-draft-layers", "5"], "ablations": ["--num-draft-layers", "3"]}


def jetspecpp(*args: str) -> None:
    """Run one command of the package; a failure ends this script."""
    print("jetspecpp", *args, flush=True)
    subprocess.run([sys.executable, "-m", "vllm_jetspecpp.cli", *args], check=True)


def train(name: str, options: list[str], sizes: list[str], args: argparse.Namespace) -> None:
    """One model, from the shared states to its checkpoint."""
    out = args.out / name
    if (out / "config.json").is_file():
        print(f"{out} is there already", flush=True)
        return
    work = args.work / name
    work.mkdir(parents=True, exist_ok=True)
    if not (work / "states").exists():
        (work / "states").symlink_to((args.work / "states").resolve())
        shutil.copy(args.work / "token_ids.safetensors", work)
    if not (work / "draft.safetensors").is_file():
        start = ["--initialise", args.initialise] if sizes is SIZES["rivals"] else []
        steps = ["--steps", str(args.steps if sizes is SIZES["rivals"] else args.ablation_steps)]
        jetspecpp("train", "draft", args.target, str(work), *sizes, *COMMON, *steps, *start, *options)
    delta = ["--delta-of", args.delta_of] if args.delta_of else []
    jetspecpp("train", "pack", args.target, str(work), str(out), *sizes, *delta)
    if name == "ssd":
        fit_fan_out(args.target, out, args.work / "calibration-answers.json")


def fit_fan_out(target: str, folder: Path, path: Path, max_new_tokens: int = 96) -> None:
    """α and ρ of SSD's allocation, on the target's answers to the calibration prompts, which are kept at ``path``."""
    from vllm_jetspecpp.config import RoundConfig
    from vllm_jetspecpp.evaluation.acceptance import Bench
    from vllm_jetspecpp.evaluation.answers import AnswerConfig, stored_answers
    from vllm_jetspecpp.evaluation.baselines.autoregressive import fit_laws
    from vllm_jetspecpp.evaluation.datasets import CALIBRATION, read_prompts
    from vllm_jetspecpp.evaluation.methods import EvalConfig
    from vllm_jetspecpp.evaluation.provenance import provenance

    config = EvalConfig(target, str(folder), RoundConfig(15), dtype="bfloat16", method="ssd")
    bench = Bench(config)
    prompts = read_prompts(CALIBRATION)
    answers = stored_answers(path, lambda: bench.answerer(prompts, AnswerConfig(max_new_tokens)))
    fit_laws(bench.engine(config), answers, folder, provenance())


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the rivals of JetSpec++.")
    parser.add_argument("methods", nargs="*", choices=[*RIVALS, []], help="default: none")
    parser.add_argument("--ablations", action="store_true", help="also the ablations of the draft model")
    parser.add_argument("--target", default=".cache/smollm2-135m-instruct")
    parser.add_argument("--work", type=Path, required=True, help="folder with states/ and token_ids.safetensors")
    parser.add_argument("--out", type=Path, default=Path(".cache/rivals"))
    parser.add_argument("--initialise", default="target", help="weights that all rivals but ssd and eagle3 start from")
    parser.add_argument("--steps", type=int, default=1200, help="of a rival (default: %(default)s)")
    parser.add_argument("--ablation-steps", type=int, default=400, help="of an ablation (default: %(default)s)")
    parser.add_argument("--delta-of", default=None, help="pack small differences from this checkpoint, as shipped")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for name in args.methods:
        train(name, RIVALS[name], SIZES["rivals"], args)
    for name, options in ABLATIONS.items() if args.ablations else ():
        train(name, options, SIZES["ablations"], args)


if __name__ == "__main__":
    main()
