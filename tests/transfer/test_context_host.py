"""The engine-driven context of a CPU engine."""

from __future__ import annotations

import pytest
from transfer_suite import *  # noqa: F403


@pytest.fixture(scope="module")
def device():
    return "cpu"
