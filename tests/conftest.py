"""What tests of several folders share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.ray_nodes import RayNodes

STARTED_WITH = dict(os.environ)
"""The environment of the command that runs the tests, before tests/vllm_plugin adds to it when it is collected."""


@pytest.fixture(scope="session")
def ray_nodes() -> Iterator[RayNodes]:
    nodes = RayNodes()
    yield nodes
    nodes.close()
