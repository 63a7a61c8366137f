"""Engines without a model, for the draft process in ``test_draft_process.py``; found there through ``sys.path``."""

import os

from vllm_jetspecpp.transport.messages import Draft, DraftBatch
from vllm_jetspecpp.types import Origin

RAISE = 666


class EchoEngine:
    """Drafts (last token + 1, its own process id, threads of torch); fails on the token RAISE."""

    def __init__(self, config):
        self.config = config

    def answer(self, batch):
        import torch

        drafts = []
        for request in batch.requests:
            if request.wants_draft:
                token = int(request.tokens[-1])
                if token == RAISE:
                    raise RuntimeError("scripted failure")
                drafts.append(Draft(request.slot, (token + 1, os.getpid(), torch.get_num_threads()), Origin.FIRST))
        return DraftBatch(batch.step, tuple(drafts))

    def work(self):
        pass


class BrokenEngine:
    def __init__(self, config):
        raise FileNotFoundError(f"no checkpoint at {config.checkpoint}")
