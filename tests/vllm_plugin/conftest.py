"""vLLM engines inside this process, on tiny models, one at a time."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # test engines are named by dotted path: tests.engines.…
# Before vLLM is imported. In one process an engine starts in two seconds and tests can look into it.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest  # noqa: E402
import torch  # noqa: E402

from tests.tiny_checkpoint import make_tiny_checkpoint  # noqa: E402
from tests.tiny_models import make_tiny_llama, make_tiny_qwen3  # noqa: E402

ENGINE_OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_seqs": 8,
    "kv_cache_memory_bytes": 1 << 26,
    "seed": 0,
}
MAX_TOKENS = 60
FAMILIES = {"llama": make_tiny_llama, "qwen3": make_tiny_qwen3}


@contextmanager
def running_engine(model: Path, **options: Any) -> Iterator[Any]:
    """An ``LLM`` that is gone afterwards."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    torch.set_num_threads(1)
    llm = LLM(str(model), **(ENGINE_OPTIONS | options))
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        cleanup_dist_env_and_memory()


def generate(llm: Any, prompts: list[list[int]], **sampling: Any) -> list[list[int]]:
    """Token ids that follow each prompt; greedy unless ``sampling`` says otherwise."""
    from vllm import SamplingParams

    params = SamplingParams(
        **({"temperature": 0.0, "max_tokens": MAX_TOKENS, "ignore_eos": True, "detokenize": False} | sampling)
    )
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def local_drafts(model: Path, folder: Path, engine: str | None) -> dict[str, Any]:
    """Options of a draft process inside the worker: the real engine over a tiny checkpoint, or one of tests.engines."""
    options: dict[str, Any] = {"method": "jetspecpp", "transport": "local", "num_speculative_tokens": 7}
    if engine is None:
        return options | {"model": str(make_tiny_checkpoint(model, folder, copy_adapter=True).folder)}
    (folder / "nothing.json").write_text("[]")
    return options | {"model": str(folder / "nothing.json"), "draft_engine": f"tests.engines.{engine}"}


def worker_of(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """Eight prompts; with 60 tokens more the longest of them leaves little of ``max_model_len``, and the last none."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(128, (n,), generator=generator).tolist() for n in (3, 17, 40, 90, 5, 128, 193, 249)]


@pytest.fixture(scope="session", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="session")
def tiny_model(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return FAMILIES[family](tmp_path_factory.mktemp(family))


@pytest.fixture(scope="session")
def plain(tiny_model: Path, prompts: list[list[int]]) -> dict[str, Any]:
    """What vLLM without us generates, and the classes it runs."""
    with running_engine(tiny_model) as llm:
        worker = worker_of(llm)
        classes = [type(worker).__module__, type(worker.model_runner).__module__]
        return {"outputs": generate(llm, prompts), "classes": classes}


@pytest.fixture(scope="session")
def sequences_file(plain: dict[str, Any], prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What :class:`tests.engines.EchoEngine` knows: prompts with their continuations."""
    path = tmp_path_factory.mktemp("echo") / "sequences.json"
    path.write_text(json.dumps([p + o for p, o in zip(prompts, plain["outputs"], strict=True)]))
    return path
