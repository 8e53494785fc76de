"""The real Triton kernel, run on the CPU by Triton's interpreter (``TRITON_INTERPRET=1``)."""

from __future__ import annotations

import os

import pytest
from copy_suite import *  # noqa: F403
from fingerprint_suite import *  # noqa: F403
from mode_suite import *  # noqa: F403

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"
)


@pytest.fixture(scope="module")
def device():
    return "cpu"
