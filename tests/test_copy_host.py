"""The block copy in host memory."""

from __future__ import annotations

import pytest
from copy_suite import *  # noqa: F403
from fingerprint_suite import *  # noqa: F403
from mode_suite import *  # noqa: F403


@pytest.fixture(scope="module")
def device():
    return "cpu"
