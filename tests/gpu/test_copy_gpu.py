"""The compiled kernel on a GPU."""

from __future__ import annotations

import pytest
from copy_suite import *  # noqa: F403
from fingerprint_suite import *  # noqa: F403
from mode_suite import *  # noqa: F403

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def device():
    return "cuda:0"
