"""Every layout, copied by the compiled kernel on a GPU."""

from __future__ import annotations

import pytest
from layout_suite import *  # noqa: F403

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def device():
    return "cuda:0"
