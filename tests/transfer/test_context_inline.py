"""Workers that cannot map the arena, and what the server lets them reach."""

from __future__ import annotations

import logging
import secrets
from contextlib import ExitStack

import pytest
import torch
from arena_tools import flip_payload_bit
from cachekit import BY_NAME, make_cache, oracle_chunk, untouched_outside
from gate_port import GatePort
from held_mover import HeldMover
from hypothesis import given
from hypothesis import strategies as st

from lmcache_kernels.adapters.messaging.client import CacheClient
from lmcache_kernels.adapters.messaging.wire import MAX_FRAME, encode_body
from lmcache_kernels.adapters.server.spawn import spawn_server
from lmcache_kernels.errors import CapacityError, Closed, KVTransferError, RemoteError
from lmcache_kernels.transfer.embedded import EmbeddedCache
from lmcache_kernels.transfer.engine_driven import registration
from lmcache_kernels.transfer.engine_driven.context import EngineDrivenContext
from lmcache_kernels.transfer.keys import shard_id
from lmcache_kernels.transfer.memory.slot_header import HEADER_BYTES
from lmcache_kernels.transfer.messages import (
    MAX_PART,
    AbortStore,
    Clear,
    CommitStore,
    GetPart,
    LoadSlots,
    PrepareRetrieve,
    PrepareStore,
    PutPart,
    Register,
    StoreSlots,
)
from lmcache_kernels.views import group_of

CHUNK = 8
WAIT = 30.0
PAYLOAD = 1000
SLOT = HEADER_BYTES + 1024
"""Of which sizes are multiples of 512."""


def names(count):
    return [secrets.token_bytes(32) for _ in range(count)]


# --- what the server lets them reach --------------------------------------------------------------


class Asked:
    """A cache in this process that is asked by messages."""

    def __init__(self):
        self.cache = EmbeddedCache(64 * SLOT, chunk_tokens=CHUNK)
        for instance in (1, 2):
            self.ask(Register(instance=instance, shard=b"s" * 32, chunk_bytes=PAYLOAD))

    def ask(self, message):
        return self.cache.request(message, 1.0).result(0)

    def code(self, message):
        try:
            self.ask(message)
        except RemoteError as error:
            return error.code
        return ""

    def reserve(self, instance, digests):
        message = PrepareStore(instance=instance, digests=b"".join(digests))
        slots = self.ask(message)
        assert isinstance(slots, StoreSlots)
        return slots

    def hold(self, instance, digests):
        slots = self.ask(PrepareRetrieve(instance=instance, digests=b"".join(digests)))
        assert isinstance(slots, LoadSlots)
        return slots


@pytest.fixture
def asked():
    made = Asked()
    yield made
    made.cache.close()


def put(slots, index=0, start=0, data=b"x", instance=1):
    return PutPart(instance=instance, ticket=slots.ticket, index=index, start=start, data=data)


def get(slots, index=0, start=0, nbytes=1, instance=1):
    return GetPart(instance=instance, ticket=slots.ticket, index=index, start=start, nbytes=nbytes)


def test_what_was_put_into_a_slot_is_read_from_it_and_from_no_other(asked):
    digests = names(3)
    slots = asked.reserve(1, digests)
    for index in range(3):
        asked.ask(put(slots, index, 0, bytes([index]) * SLOT))
        asked.ask(put(slots, index, SLOT - 1, b"\xff"))
    asked.ask(CommitStore(instance=1, ticket=slots.ticket))
    held = asked.hold(2, digests)
    for index in range(3):
        whole = asked.ask(get(held, index, 0, SLOT, instance=2)).data
        assert whole == bytes([index]) * (SLOT - 1) + b"\xff"
        assert asked.ask(get(held, index, SLOT - 1, 1, instance=2)).data == b"\xff"


@given(
    start=st.integers(-2, SLOT + 2) | st.sampled_from([-(1 << 63), 1 << 62, (1 << 64) - 1]),
    nbytes=st.integers(-2, SLOT + 2) | st.sampled_from([MAX_PART + 1, -(1 << 63), (1 << 64) - 1]),
    index=st.integers(-2, 3) | st.sampled_from([1 << 62]),
)
def test_no_part_reaches_beyond_its_slot(start, nbytes, index):
    asked = Asked()
    try:
        digests = names(2)
        slots = asked.reserve(1, digests)
        inside = 0 <= index < 2 and start >= 0 and nbytes >= 1 and start + nbytes <= SLOT
        if 0 <= nbytes <= MAX_PART + 1:
            code = asked.code(put(slots, index, start, bytes(nbytes)))
            assert code == "" if inside else code in ("bad_request", "unknown_ticket")
        asked.ask(CommitStore(instance=1, ticket=slots.ticket))
        held = asked.hold(1, digests)
        code = asked.code(get(held, index, start, nbytes))
        assert code == "" if inside else code in ("bad_request", "unknown_ticket")
    finally:
        asked.cache.close()


def test_only_the_owner_of_a_ticket_reaches_its_slots_and_only_for_what_it_is(asked):
    """Chunks that others may read cannot be written, and nobody reads what is being written."""
    digests = names(1)
    slots = asked.reserve(1, digests)
    assert asked.code(put(slots, instance=2)) == "unknown_ticket"
    assert asked.code(get(slots)) == "unknown_ticket"
    assert asked.code(put(slots, instance=3)) == "unknown_instance"
    assert asked.code(put(slots)) == ""
    asked.ask(CommitStore(instance=1, ticket=slots.ticket))
    assert asked.code(put(slots)) == "unknown_ticket"
    held = asked.hold(1, digests)
    assert asked.code(put(held)) == "unknown_ticket"
    assert asked.code(get(held, instance=2)) == "unknown_ticket"
    assert asked.code(get(held)) == ""


def test_an_aborted_or_cleared_store_is_not_written_where_others_write(asked):
    slots = asked.reserve(1, names(1))
    asked.ask(AbortStore(instance=1, ticket=slots.ticket))
    assert asked.code(put(slots)) == "unknown_ticket"
    slots = asked.reserve(1, names(1))
    asked.ask(Clear())
    other = asked.reserve(2, names(1))
    assert slots.offsets != other.offsets
    asked.ask(put(other, data=b"other", instance=2))
    asked.ask(put(slots, data=b"yours"))
    asked.ask(CommitStore(instance=2, ticket=other.ticket))
    with pytest.raises(RemoteError, match="unknown_ticket"):
        asked.ask(CommitStore(instance=1, ticket=slots.ticket))


def test_the_largest_part_fits_into_a_message():
    message = PutPart(
        instance=(1 << 63) - 1, ticket=1 << 62, index=1 << 16, start=1 << 40, data=bytes(MAX_PART)
    )
    assert len(encode_body(message)) < MAX_FRAME


# --- the worker -----------------------------------------------------------------------------------


@pytest.fixture
def opened():
    with ExitStack() as closing:
        yield closing


@pytest.fixture
def unmapped(monkeypatch):
    """No arena can be mapped."""

    def refuse(*_, **__):
        raise CapacityError("not in this container")

    monkeypatch.setattr(registration, "Attachment", refuse)


def context_at(port, opened, mover=None, timeout=WAIT):
    """(context, cache)"""
    cache = make_cache(BY_NAME["kv_first_hnd"], blocks=24)
    cache.fill_random(1)
    context = EngineDrivenContext(
        [group_of(cache.tensors, cache.axes)],
        chunk_tokens=CHUNK,
        shard=lambda layout: shard_id(layout.fingerprint, index=0, count=1),
        instance=secrets.randbits(63),
        port=port,
        mover=mover,
        timeout=timeout,
    )
    opened.callback(context.close)
    return context, cache


def test_through_a_real_server_and_a_chunk_that_was_damaged_there(unmapped, opened):
    server = opened.enter_context(spawn_server(size_gb=0.01, chunk_size=CHUNK))
    client = opened.enter_context(CacheClient(server.url, chunk_tokens=CHUNK))
    client.wait_ready(WAIT)
    context, cache = context_at(client, opened)
    digests = names(3)
    assert context.submit_store(digests, [[0, 1, 2, 3, 4, 5]]).result.result(WAIT) == 3
    flip_payload_bit(server, 1, 77)
    to = [10, 11, 12, 13, 14, 15]
    before = cache.snapshot()
    assert context.submit_retrieve(digests, [to]).result(WAIT) == 1
    assert torch.equal(oracle_chunk(cache, to[:2]), oracle_chunk(cache, [0, 1]))
    assert untouched_outside(cache, before, to[:4])  # the third was not even fetched
    assert context.submit_retrieve(digests, [to]).result(WAIT) == 1
    assert context.submit_store(digests, [[0, 1, 2, 3, 4, 5]]).result.result(WAIT) == 1
    assert context.submit_retrieve(digests, [to]).result(WAIT) == 3


def test_fault_e07_without_shared_memory_one_warning_names_cause_and_remedy_and_all_works(
    unmapped, opened, caplog
):
    """Through a real server, whose arena the worker cannot map."""
    server = opened.enter_context(spawn_server(size_gb=0.01, chunk_size=CHUNK))
    client = opened.enter_context(CacheClient(server.url, chunk_tokens=CHUNK))
    client.wait_ready(WAIT)
    context, cache = context_at(client, opened)
    with caplog.at_level(logging.WARNING):
        context.register()
        for round_ in range(3):
            digests = names(2)
            ids = [4 * round_ + n for n in range(4)]
            assert context.submit_store(digests, [ids]).result.result(WAIT) == 2
            assert context.submit_retrieve(digests, [[20, 21, 22, 23]]).result(WAIT) == 2
            assert torch.equal(oracle_chunk(cache, [20, 21, 22, 23]), oracle_chunk(cache, ids))
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "not in this container" in record.getMessage(), "the cause"
    assert "let both processes have the same /dev/shm and user" in record.getMessage()


def test_fault_e07_an_empty_part_is_refused_at_once_and_a_slot_without_parts_is_never_loaded(
    opened, unmapped
):
    port = GatePort(opened.enter_context(EmbeddedCache(1 << 18, chunk_tokens=CHUNK)))
    context, cache = context_at(port, opened)
    context.register()
    before = cache.snapshot()
    (digest,) = names(1)

    def ask(message):
        return port.request(message, WAIT).result(0)

    slots = ask(PrepareStore(instance=context.instance, digests=digest))
    for message in (
        PutPart(instance=context.instance, ticket=slots.ticket, index=0, start=0, data=b""),
        GetPart(instance=context.instance, ticket=slots.ticket, index=0, start=0, nbytes=0),
    ):
        with pytest.raises(RemoteError) as caught:
            ask(message)
        assert caught.value.code in ("bad_request", "unknown_ticket")
    ask(CommitStore(instance=context.instance, ticket=slots.ticket))
    assert context.submit_retrieve([digest], [[0, 1]]).result(WAIT) == 0
    assert untouched_outside(cache, before, [])
    assert port.inner.stats()["damaged"] == 1
    assert context.submit_store([digest], [[0, 1]]).result.result(WAIT) == 1, "not offered again"


@pytest.fixture
def async_rig(unmapped, opened):
    """(context, cache, port, mover), the mover asynchronous."""
    port = GatePort(opened.enter_context(EmbeddedCache(1 << 18, chunk_tokens=CHUNK)))
    movers = []

    def mover(groups, layout):
        movers.append(HeldMover(groups, layout))
        return movers[0]

    context, cache = context_at(port, opened, mover)
    opened.callback(lambda: (port.let_go(), movers[0].let_go()))
    return context, cache, port, movers[0]


def test_a_flush_stops_a_store_between_two_of_its_chunks(async_rig):
    """The first chunk is on its way to the server: its blocks are read, those of the second will
    never be."""
    context, _, port, mover = async_rig
    port.hold(PutPart)
    transfer = context.submit_store(names(2), [[0, 1, 2, 3]])
    port.wait_sent(PutPart)
    context.flush([transfer], 0.0)
    assert transfer.wanted
    port.let_go()
    with pytest.raises(Closed, match="stopped"):
        transfer.result.result(WAIT)
    assert [blocks.blocks for _, moves in mover.moves for blocks in moves] == [((0, 1),)]
    assert len(port.of(AbortStore)) == 1
    assert port.inner.stats()["used_bytes"] == 0


def test_a_server_that_goes_away_between_two_chunks_ends_the_transfer(async_rig):
    context, _, port, _ = async_rig
    digests = names(2)
    assert context.submit_store(digests, [[0, 1, 2, 3]]).result.result(WAIT) == 2
    port.before(GetPart, lambda _: port.inner.close() if len(port.of(GetPart)) == 1 else None)
    with pytest.raises(KVTransferError):
        context.submit_retrieve(digests, [[8, 9, 10, 11]]).result(WAIT)
    with pytest.raises(KVTransferError):
        context.submit_store(names(1), [[0, 1]]).result.result(WAIT)


def test_both_directions_at_once_have_memory_of_their_own(async_rig):
    context, cache, _, _ = async_rig
    digests = names(6)
    ids = list(range(12))
    assert context.submit_store(digests[:3], [ids[:6]]).result.result(WAIT) == 3
    stores = [context.submit_store(digests[3 + n : 4 + n], [ids[6 + 2 * n :]]) for n in range(3)]
    loads = [
        context.submit_retrieve(digests[n : n + 1], [[12 + 2 * n, 13 + 2 * n]]) for n in range(3)
    ]
    assert [one.result.result(WAIT) for one in stores] == [1, 1, 1]
    assert [one.result(WAIT) for one in loads] == [1, 1, 1]
    assert torch.equal(oracle_chunk(cache, list(range(12, 18))), oracle_chunk(cache, ids[:6]))
    again = context.submit_retrieve(digests[3:], [list(range(12, 18))])
    assert again.result(WAIT) == 3
    assert torch.equal(oracle_chunk(cache, list(range(12, 18))), oracle_chunk(cache, ids[6:]))
