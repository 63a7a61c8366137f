"""What tests of several folders share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ray_nodes import RayNodes


@pytest.fixture(scope="session")
def ray_nodes() -> Iterator[RayNodes]:
    nodes = RayNodes()
    yield nodes
    nodes.close()
