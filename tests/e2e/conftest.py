"""What a user starts runs in a user's environment."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.conftest import STARTED_WITH


@pytest.fixture(scope="module", autouse=True)
def _environment_of_a_user() -> Iterator[None]:
    """Without what tests of engines in this process want: one process, one thread, a silent vLLM."""
    with_tests = dict(os.environ)
    os.environ.clear()
    os.environ.update(STARTED_WITH)
    yield
    os.environ.clear()
    os.environ.update(with_tests)
