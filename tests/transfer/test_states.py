"""What a service tells of its workers and chunks."""

from __future__ import annotations

import math

import pytest

from lmcache_kernels.transfer.addresses import is_loopback
from lmcache_kernels.transfer.messages import CommitStore, Lookup, Pin, Ping, PrepareStore, Register
from lmcache_kernels.transfer.serving.chunk_table import ChunkState
from lmcache_kernels.transfer.serving.known_workers import Liveness, WorkerState
from lmcache_kernels.transfer.serving.pins import PinState
from lmcache_kernels.transfer.serving.service import CacheService

SHARD = b"s" * 32
DIGESTS = [bytes([n]) * 32 for n in range(6)]


def served(**options) -> CacheService:
    return CacheService(
        arena_name="lmcache_kernels_test",
        arena_bytes=8 * 1024,
        chunk_tokens=16,
        incarnation="i",
        **options,
    )


@pytest.mark.parametrize("liveness", [Liveness(), Liveness(math.inf, math.inf)])
def test_workers_and_when_they_were_heard_of_last(liveness) -> None:
    service = served(liveness=liveness)
    service.handle(Register(instance=7, shard=SHARD, chunk_bytes=500), 1.0)
    service.handle(Register(instance=3, shard=SHARD, chunk_bytes=500), 2.0)
    service.handle(Ping(instance=3), 5.0)
    service.handle(PrepareStore(instance=7, digests=b""), 6.0)
    assert service.workers(9.0) == [
        WorkerState(3, SHARD, 500, 4.0, True, False),
        WorkerState(7, SHARD, 500, 3.0, False, False),
    ]


def test_chunks_page_by_page() -> None:
    service = served()
    service.handle(Register(instance=1, shard=SHARD, chunk_bytes=500), 0.0)
    slots = service.handle(PrepareStore(instance=1, digests=b"".join(DIGESTS[:3])), 0.0)
    service.handle(CommitStore(instance=1, ticket=slots.ticket), 0.0)
    service.handle(PrepareStore(instance=1, digests=DIGESTS[5]), 0.0)
    service.handle(Lookup(request="r", shards=[SHARD], digests=DIGESTS[0]), 0.0)
    assert service.chunks(0, 2) == [
        ChunkState(SHARD, DIGESTS[0], 1024, holders=1, hits=1, resident=True),
        ChunkState(SHARD, DIGESTS[1], 1024, holders=0, hits=0, resident=True),
    ]
    assert [state.digest for state in service.chunks(1, 9)] == [DIGESTS[1], DIGESTS[2], DIGESTS[5]]
    assert service.chunks(3, 1) == [ChunkState(SHARD, DIGESTS[5], 1024, 1, 0, resident=False)]
    assert service.chunks(4, 5) == []


def test_pins_and_quotas() -> None:
    service = served()
    service.handle(Register(instance=1, shard=SHARD, chunk_bytes=500), 0.0)
    slots = service.handle(PrepareStore(instance=1, digests=b"".join(DIGESTS[:3])), 0.0)
    service.handle(CommitStore(instance=1, ticket=slots.ticket), 0.0)
    for pin, count, seconds in (("b", 2, 30.0), ("a", 3, 50.0)):
        digests = b"".join(DIGESTS[:count])
        service.handle(Pin(pin=pin, shards=[SHARD], digests=digests, seconds=seconds), 1.0)
    assert service.pins(11.0) == [PinState("a", 3, 40.0), PinState("b", 2, 20.0)]
    assert service.pins(31.0) == [PinState("a", 3, 20.0)]
    assert service.default_quota is None
    service.set_quota(None, 5)
    assert service.default_quota == 5


@pytest.mark.parametrize(
    ("host", "only_here"),
    [
        *(("127.0.0.1", True), ("127.9.9.9", True), ("localhost", True), ("::1", True)),
        *(("[::1]", True), ("0.0.0.0", False), ("10.0.0.1", False), ("::", False)),
        *(("localhost.example.org", False), ("127.0.0.1.example.org", False), ("", False)),
    ],
)
def test_which_addresses_only_this_machine_can_reach(host, only_here) -> None:
    assert is_loopback(host) is only_here
