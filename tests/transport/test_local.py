"""The local transport: the engine runs inside ``send``."""

import pytest
import torch

from vllm_jetspecpp.transport.local import LocalEnd
from vllm_jetspecpp.transport.messages import Draft, DraftBatch, Verified, VerifiedBatch
from vllm_jetspecpp.types import Origin


class Recorder:
    def __init__(self):
        self.calls = []

    def answer(self, batch):
        self.calls.append(("answer", batch.step))
        return DraftBatch(batch.step, tuple(Draft(r.slot, (1,), Origin.FIRST) for r in batch.requests if r.wants_draft))

    def work(self):
        self.calls.append(("work", None))


def batch(step, wants_draft=True):
    return VerifiedBatch(
        step, (Verified(2, 0, torch.ones(1, dtype=torch.int32), 0, torch.zeros(0, 4), wants_draft=wants_draft),)
    )


def test_answers_then_works():
    engine = Recorder()
    end = LocalEnd(engine)
    end.send(batch(5))
    assert engine.calls == [("answer", 5), ("work", None)]
    assert end.receive(5, 0.0) == DraftBatch(5, (Draft(2, (1,), Origin.FIRST),))


def test_no_answer_is_a_timeout():
    end = LocalEnd(Recorder())
    end.send(batch(5))
    with pytest.raises(TimeoutError):
        end.receive(6, 1.0)
    end.send(batch(6, wants_draft=False))
    with pytest.raises(TimeoutError):
        end.receive(6, 1.0)
