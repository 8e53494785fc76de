"""A fixture for each way of using the tiers under test."""

from __future__ import annotations

import pytest
from tier_stores import SERVICES, STORES, opened


@pytest.fixture(scope="session", params=list(STORES))
def store(request):
    """One of each kind for all tests: made once, and never killed."""
    with opened(request.param) as store:
        yield store


@pytest.fixture(scope="session")
def rig(store):
    """A tier on it for all tests."""
    return store.open()


@pytest.fixture(params=SERVICES)
def mortal(request):
    """A store with a service of its own, for one test."""
    with opened(request.param) as store:
        yield store


@pytest.fixture
def files_store():
    with opened("files") as store:
        yield store
