"""What `train pack` writes for a rival is what vLLM's built-in drafters load: the same file serves both comparisons."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny_models import make_tiny_llama
from tests.tiny_rivals import TAPS, eagle3_logits, make_tiny_eagle3, make_tiny_rival
from tests.vllm_plugin.conftest import generate, running_engine
from vllm_jetspecpp.benchmarking import dflash_on_cpu
from vllm_jetspecpp.benchmarking.methods import Choice, make_method
from vllm_jetspecpp.benchmarking.runner import BenchConfig, unpack_rivals
from vllm_jetspecpp.evaluation.baselines.parallel import ParallelEngine, Rival
from vllm_jetspecpp.models.eagle3 import load_head
from vllm_jetspecpp.models.target_parts import load_target_config, load_target_parts

COUNT = 5
PROMPT = list(range(3, 20))


@torch.inference_mode()
def own_drafts(engine: ParallelEngine, model: Any, tokens: list[int]) -> list[int]:
    """What our engine drafts behind ``tokens``."""
    hidden = model(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states
    engine.reset()
    engine.tokens = tokens
    engine.commit(0, torch.cat([hidden[tap + 1][0] for tap in TAPS], dim=-1))
    return list(engine.draft())


def answer_and_proposals(
    target: Path, rival: Path, method: str, proposer: Any, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[int], list[list[int]]]:
    """What vLLM answers with a built-in ``method``, and all that its drafter proposed on the way."""
    proposed: list[list[int]] = []
    propose = proposer.propose

    def spy(self: Any, *args: Any, **kwargs: Any) -> Any:
        drafts = propose(self, *args, **kwargs)
        proposed.append(drafts[0].tolist())
        return drafts

    monkeypatch.setattr(proposer, "propose", spy)
    options = {"method": method, "model": str(rival), "num_speculative_tokens": COUNT}
    with running_engine(target, speculative_config=options) as llm:
        return generate(llm, [PROMPT], max_tokens=24)[0], proposed


def by_prefix(answer: list[int], proposed: list[list[int]]) -> dict[int, list[int]]:
    """Each proposal by the number of the answer's tokens that it stands behind."""
    known, found = 1, dict[int, list[int]]()
    for drafts in proposed:
        if known > len(answer):
            break
        found[known] = drafts
        rest = answer[known:]
        known += next((i for i, pair in enumerate(zip(drafts, rest, strict=False)) if pair[0] != pair[1]), COUNT) + 1
    return found


@pytest.mark.parametrize("method", ["dflash", "jetspec"])
def test_vllm_drafts_the_same_tokens(tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own ``dflash`` loads the file, a shortened vocabulary included, and proposes our engine's tokens.

    On a CPU that takes the repair with which `bench serve` measures it.
    """
    from transformers import AutoModelForCausalLM
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model
    from vllm.v1.spec_decode.dflash import DFlashProposer

    monkeypatch.setattr(DFlashQwen3Model, "_normalize_context_k", DFlashQwen3Model._normalize_context_k)  # put back
    dflash_on_cpu.repair()
    target = make_tiny_llama(tmp_path / "target")
    rival = make_tiny_rival(target, tmp_path / method, method)
    answer, proposed = answer_and_proposals(target, rival, "dflash", DFlashProposer, monkeypatch)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    engine = ParallelEngine(Rival.load(rival, target, 256, torch.float32), COUNT, 0)
    found = by_prefix(answer, proposed)
    assert len(found) > 5
    assert found == {n: own_drafts(engine, model, [*PROMPT, *answer[:n]]) for n in found}


@torch.inference_mode()
def test_vllm_serves_a_small_eagle3_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Made whole, vLLM's own ``eagle3`` loads it, answers as without it, and proposes what our head drafts by steps."""
    from transformers import AutoModelForCausalLM
    from vllm.v1.spec_decode.eagle import EagleProposer

    target = make_tiny_llama(tmp_path / "target")
    small = make_tiny_eagle3(target, tmp_path / "rivals/eagle3")
    bench = BenchConfig(target, Choice(("eagle3",), rivals=small.parent), work=tmp_path)
    method, _ = make_method("eagle3", bench.choice, tmp_path / "unpacked")
    assert method is not None
    rival = Path(method.speculative["model"])
    for _ in range(2):  # a second run replaces what is there
        unpack_rivals({"eagle3": method}, bench)
    assert [file.name for file in rival.parent.iterdir()] == ["eagle3"] and rival != small
    answer, proposed = answer_and_proposals(target, rival, "eagle3", EagleProposer, monkeypatch)
    with running_engine(target) as llm:
        assert generate(llm, [PROMPT], max_tokens=24)[0] == answer

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    head, token_ids = load_head(small, load_target_config(target))
    head.bfloat16().float()  # as it was made whole
    parts = load_target_parts(target, TAPS[-1], token_ids, 256, torch.float32)
    parts.head = parts.head.bfloat16().float()
    tokens = [*PROMPT, *answer]
    hidden = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    states = torch.cat([hidden[tap + 1][0] for tap in TAPS], dim=-1)
    found = by_prefix(answer, proposed)
    assert len(found) > 5
    for count, proposal in found.items():
        anchor, drafts = len(PROMPT) + count - 1, list[int]()
        for _ in range(COUNT):
            read = torch.tensor(tokens[: anchor + 1] + drafts)
            drafts.append(int(token_ids[eagle3_logits(head, parts, states[:anchor], read)[-1].argmax()]))
        assert drafts == proposal
