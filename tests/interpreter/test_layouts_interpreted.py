"""Every layout, copied by the real Triton kernel on the CPU (``TRITON_INTERPRET=1``)."""

from __future__ import annotations

import os

import pytest
from layout_suite import *  # noqa: F403

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"
)


@pytest.fixture(scope="module")
def device():
    return "cpu"
