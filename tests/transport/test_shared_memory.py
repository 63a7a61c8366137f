"""What is particular to shared memory; what it has in common with TCP is in test_two_processes.py."""

import dataclasses
import os
import time
from pathlib import Path

import pytest
import torch

from tests.transport.ends import connected, verified
from vllm_jetspecpp.transport.base import TransportClosed
from vllm_jetspecpp.transport.messages import VerifiedBatch
from vllm_jetspecpp.transport.shared_memory import SharedMemoryDraftEnd, SharedMemoryWorkerEnd

PAGE = 4096


def test_answers_come_after_both_ends_went_to_sleep():
    with connected("shared_memory", spin=0.0) as (end, _):
        for step in range(3):
            time.sleep(0.2)  # longer than any spin of the draft end
            end.send(VerifiedBatch(step, (verified(0, [step], torch.ones(1, 8)),)))
            began = time.perf_counter()
            assert end.receive(step, 5.0).step == step
            assert time.perf_counter() - began < 1.0


def test_who_waited_in_vain_sleeps_from_then_on():
    """The draft process waits half a second at a time: it must not spin at the start of each."""
    worker = SharedMemoryWorkerEnd(to_draft_bytes=PAGE, to_worker_bytes=PAGE)
    draft = SharedMemoryDraftEnd(worker.handle, spin=0.2)
    used = []
    for expected in (True, False, True):
        if expected:
            worker.send(VerifiedBatch(1, (verified(0, [1], torch.ones(1, 8)),)))
            assert draft.receive(5.0) is not None
        began = time.thread_time()
        assert draft.receive(0.4) is None
        used.append(time.thread_time() - began)
    assert used[1] < min(used[0], used[2]) / 2
    draft.close()
    worker.close()


def test_memory_has_no_name_and_is_the_users_alone():
    """Others reach it through /proc/<pid>/fd only, which the kernel opens to the same user (and to root)."""
    worker = SharedMemoryWorkerEnd(to_draft_bytes=PAGE, to_worker_bytes=PAGE)
    path = Path(f"/proc/self/fd/{worker.handle.fd}")
    assert os.readlink(path) == "/memfd:vllm_jetspecpp (deleted)"
    assert os.stat("/proc/self/fd").st_mode & 0o777 == 0o500
    assert os.fstat(worker.handle.fd).st_mode & 0o777 == 0o600
    assert not os.get_inheritable(worker.handle.fd)
    assert os.fstat(worker.handle.fd).st_blocks * 512 >= worker.handle.size  # taken at start, not page by page
    worker.close()


@pytest.mark.parametrize("change", [{"nonce": 1}, {"to_draft_bytes": 2 * PAGE}])
def test_wrong_memory_is_refused(change):
    worker = SharedMemoryWorkerEnd(to_draft_bytes=PAGE, to_worker_bytes=PAGE)
    with pytest.raises(ValueError, match="memory"):
        SharedMemoryDraftEnd(dataclasses.replace(worker.handle, **change))
    assert not worker.attached
    worker.close()


def test_a_damaged_ring_is_refused():
    worker = SharedMemoryWorkerEnd(to_draft_bytes=PAGE, to_worker_bytes=PAGE)
    draft = SharedMemoryDraftEnd(worker.handle)
    worker.send(VerifiedBatch(1, (verified(0, [1], torch.ones(1, 8)),)))
    os.pwrite(worker.handle.fd, (1 << 40).to_bytes(8, "little"), PAGE)  # the length of the first record
    with pytest.raises(ValueError, match="damaged"):
        draft.receive(1.0)
    draft.close()
    worker.close()


def test_close_is_idempotent_and_frees_the_descriptor():
    descriptors = len(os.listdir("/proc/self/fd"))
    worker = SharedMemoryWorkerEnd(to_draft_bytes=PAGE, to_worker_bytes=PAGE)
    draft = SharedMemoryDraftEnd(worker.handle)
    worker.close()
    worker.close()
    with pytest.raises(TransportClosed):
        draft.receive(1.0)
    with pytest.raises(TransportClosed):
        worker.receive(1, 0.0)
    draft.close()
    draft.close()
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_sizes_are_checked():
    with pytest.raises(ValueError, match="multiple of"):
        SharedMemoryWorkerEnd(to_draft_bytes=1000)
