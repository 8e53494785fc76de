"""What only a worker that copies by itself does, on a CPU engine."""

from __future__ import annotations

import pytest
from engine_suite import *  # noqa: F403


@pytest.fixture(scope="module")
def device():
    return "cpu"
