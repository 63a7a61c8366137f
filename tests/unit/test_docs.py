"""The documents name tests and files that are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_serving_names_tests_that_exist() -> None:
    """Every line of the tables in docs/serving.md is proved by a test, or says why not."""
    named = re.findall(r"`((?:unit|runtime|transport|vllm_plugin|e2e)/test_\w+)(?:::(test_\w+))?`", serving())
    assert len(named) > 60
    for file, test in named:
        path = ROOT / "tests" / f"{file}.py"
        assert path.is_file(), f"docs/serving.md names {file}"
        assert not test or f"def {test}(" in path.read_text(), f"docs/serving.md names {file}::{test}"


def serving() -> str:
    return (ROOT / "docs/serving.md").read_text()


DOCUMENTS = [
    "README.md",
    *(f"docs/{name}.md" for name in ("serving", "one_request", "evaluation", "benchmarking")),
]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_files_named_in_documents_exist(document: str) -> None:
    text = (ROOT / document).read_text()
    for path in re.findall(r"`((?:docs|examples|benchmarks|scripts|checkpoints)/[\w./-]+)`", text):
        assert (ROOT / path).exists(), f"{document} names {path}"
