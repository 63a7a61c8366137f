"""Tiny targets with random checkpoints, in both families."""

from __future__ import annotations

import pytest

from tests.tiny_round import MAKERS, Tiny, make_tiny


@pytest.fixture(scope="session", params=MAKERS)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny(request.param, tmp_path_factory.mktemp(request.param))
