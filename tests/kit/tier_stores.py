"""The tiers under test, in one table, with the services that they need."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from servicekit import running_mooncake_master, running_redis, running_redis_cluster
from tier_rig import Rig

from lmcache_kernels.adapters.tiers.opening import open_tier

if TYPE_CHECKING:
    from collections.abc import Callable

TIMEOUT = 1
"""Seconds, of every tier under test."""

BOUND = 8.0
"""Seconds within which a call of a tier that is away ends; a client of Mooncake Store takes 4.5."""


@dataclass
class Store:
    """Somewhere to keep chunks, and the tiers that use it.

    Args:
        service: to be killed and started; None for files.
        url: without options.
        options: of the URL.
    """

    service: Any
    url: str
    options: dict = field(default_factory=dict)
    rigs: list = field(default_factory=list)

    def full_url(self, **options):
        """With the options of every tier of this store, and these."""
        query = "&".join(f"{name}={value}" for name, value in (self.options | options).items())
        return f"{self.url}?{query}"

    def open(self, **options):
        """A tier of its own; closed with the store."""
        rig = Rig(open_tier(self.full_url(**options)))
        self.rigs.append(rig)
        return rig

    def close(self):
        for rig in self.rigs:
            rig.close()


@contextlib.contextmanager
def files():
    directory = tempfile.mkdtemp(prefix="lmcache_kernels_files_")
    try:
        yield Store(None, f"file://{directory}/cache", {"size_gb": 1})
    finally:
        shutil.rmtree(directory)


@contextlib.contextmanager
def valkey():
    pytest.importorskip("valkey")
    with running_redis() as service:
        yield Store(service, f"valkey://127.0.0.1:{service.port}", {"timeout_seconds": TIMEOUT})


@contextlib.contextmanager
def valkey_cluster():
    pytest.importorskip("valkey")
    with running_redis_cluster() as service:
        options = {"timeout_seconds": TIMEOUT, "cluster": 1}
        yield Store(service, f"redis://127.0.0.1:{service.port}", options)


@contextlib.contextmanager
def mooncake():
    with running_mooncake_master() as service:
        options = {"timeout_seconds": TIMEOUT, "segment_gb": 0.25}
        yield Store(service, f"mooncake://127.0.0.1:{service.port}", options)


STORES: dict[str, Callable] = {
    "files": files,
    "valkey": valkey,
    "valkey-cluster": valkey_cluster,
    "mooncake": mooncake,
}
SERVICES = [name for name in STORES if name != "files"]


@contextlib.contextmanager
def opened(name):
    with STORES[name]() as store:
        try:
            yield store
        finally:
            store.close()
