"""What `train pack` writes for a rival is what vLLM's built-in drafters load: the same file serves both comparisons."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny_models import make_tiny_llama
from tests.tiny_rivals import TAPS, make_tiny_rival
from tests.vllm_plugin.conftest import generate, running_engine
from vllm_jetspecpp.evaluation.baselines.parallel import ParallelEngine, Rival

COUNT = 5


@torch.inference_mode()
def own_drafts(engine: ParallelEngine, model: Any, tokens: list[int]) -> list[int]:
    """What our engine drafts behind ``tokens``."""
    hidden = model(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states
    engine.reset()
    engine.tokens = tokens
    engine.commit(0, torch.cat([hidden[tap + 1][0] for tap in TAPS], dim=-1))
    return list(engine.draft())


@pytest.mark.parametrize("method", ["dflash", "jetspec"])
def test_vllm_drafts_the_same_tokens(tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own ``dflash`` loads the file, a shortened vocabulary included, and proposes our engine's tokens."""
    from transformers import AutoModelForCausalLM
    from vllm.v1.spec_decode.dflash import DFlashProposer

    target = make_tiny_llama(tmp_path / "target")
    rival = make_tiny_rival(target, tmp_path / method, method)
    proposed: list[list[int]] = []
    propose = DFlashProposer.propose

    def spy(self: Any, *args: Any, **kwargs: Any) -> Any:
        drafts = propose(self, *args, **kwargs)
        proposed.append(drafts[0].tolist())
        return drafts

    monkeypatch.setattr(DFlashProposer, "propose", spy)
    prompt = list(range(3, 20))
    options = {"method": "dflash", "model": str(rival), "num_speculative_tokens": COUNT}
    with running_engine(target, speculative_config=options) as llm:
        answer = generate(llm, [prompt], max_tokens=24)[0]
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    engine = ParallelEngine(Rival.load(rival, target, 256, torch.float32), COUNT, 0)
    own = [own_drafts(engine, model, [*prompt, *answer[: n + 1]]) for n in range(len(answer))]
    # Every proposal of vLLM's stands behind some prefix of the answer.
    assert len(proposed) > 5
    known = Counter(map(tuple, own))
    assert all(tuple(drafts) in known for drafts in proposed[:-1])
