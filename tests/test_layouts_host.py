"""Every layout, copied in host memory."""

from __future__ import annotations

import pytest
from layout_suite import *  # noqa: F403


@pytest.fixture(scope="module")
def device():
    return "cpu"
