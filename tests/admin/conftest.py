from __future__ import annotations

import pytest
from adminkit import AdminRig


@pytest.fixture
def rig():
    with AdminRig() as rig:
        yield rig
