"""Workers that ask a server to copy what it must not: nothing is opened, moved, leased or lost."""

from __future__ import annotations

import random
import secrets

import msgspec
import numpy as np
import pytest
import torch
from formkit import CUDA_UUID
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmcache_kernels.chunk_layout import ChunkLayout
from lmcache_kernels.errors import CapacityError, LayoutError, RemoteError
from lmcache_kernels.transfer.cache_forms import (
    MAX_PARTS,
    MAX_ROWS,
    ArraysForm,
    AxesForm,
    PagesForm,
    ShardPart,
)
from lmcache_kernels.transfer.embedded import EmbeddedCache
from lmcache_kernels.transfer.kv_groups import KVGroup
from lmcache_kernels.transfer.memory.arena import Arena
from lmcache_kernels.transfer.messages import (
    MAX_CHUNKS,
    AbortStore,
    CommitStore,
    Copied,
    Done,
    LoadBlocks,
    Loaded,
    Ping,
    Register,
    RegisterCache,
    Settle,
    StoreBlocks,
)
from lmcache_kernels.transfer.sharing.descriptors import (
    CpuShare,
    CudaShare,
    PluginShare,
    TensorDescriptor,
)
from lmcache_kernels.transfer.sharing.wrapping import wrap_kv_caches

CHUNK, BLOCKS = 8, 12  # chunks of two blocks of four tokens
WAIT = 30.0
DIGESTS = [bytes([i]) * 32 for i in range(8)]


class Server:
    """A cache of one worker, all of whose blocks hold their number, at an embedded server."""

    def __init__(self):
        self.cache = EmbeddedCache(1 << 18, chunk_tokens=CHUNK)
        self.tensor = torch.arange(BLOCKS, dtype=torch.int16).repeat_interleave(64).view(-1, 4, 16)
        self.tensor = self.tensor.clone()
        group = KVGroup.of(self.tensor, "block token dim")
        self.wrapped = wrap_kv_caches({"layer": self.tensor})
        self.layout = ChunkLayout.of([group.read()], CHUNK)
        self.register = RegisterCache(
            instance=1,
            shard=ShardPart().shard(self.layout.fingerprint),
            part=ShardPart(),
            groups=[group.share(iter(self.wrapped.descriptors))],
        )

    def ask(self, message):
        """The reply, or the code of an error and what it says."""
        try:
            return self.cache.request(message, WAIT).result(WAIT)
        except RemoteError as error:
            return error.code, str(error)

    def with_piece(self, **changes):
        """The registration with another first piece."""
        piece = msgspec.structs.replace(self.register.groups[0][0], **changes)
        return msgspec.structs.replace(self.register, groups=[(piece,)])

    def with_tensor(self, **changes):
        (tensor,) = self.register.groups[0][0].tensors
        return self.with_piece(tensors=(msgspec.structs.replace(tensor, **changes),))

    def blocks(self, *ids):
        return [np.array(ids, dtype="<i4").tobytes()]

    def idle(self):
        """Whether no slot is held by anybody."""
        stats = self.cache.stats()
        return (stats["writing"], stats["reads"], stats["idle"]) == (0, 0, stats["resident"])


@pytest.fixture
def server():
    made = Server()
    yield made
    made.cache.close()


@pytest.fixture
def registered(server):
    server.ask(server.register)
    stored = server.ask(store(server, 1, 4))
    assert stored == Copied(ticket=stored.ticket, chunks=4)
    server.ask(CommitStore(instance=1, ticket=stored.ticket))
    return server


def store(server, transfer, chunks, first=0, **changes):
    made = StoreBlocks(
        instance=1,
        transfer=transfer,
        digests=b"".join(DIGESTS[first : first + chunks]),
        blocks=server.blocks(*range(2 * chunks)),
    )
    return msgspec.structs.replace(made, **changes)


def load(server, transfer, chunks, **changes):
    made = LoadBlocks(
        instance=1,
        transfer=transfer,
        digests=b"".join(DIGESTS[:chunks]),
        blocks=server.blocks(*range(2 * chunks)),
    )
    return msgspec.structs.replace(made, **changes)


# --- registrations --------------------------------------------------------------------------------

ELSEWHERE = CpuShare(segment="lmcache_kernels_" + "0" * 32, nbytes=1536, offset=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: {"groups": []}, "groups: expected 1 to"),
        (lambda s: {"groups": [()]}, "pieces: expected 1 to"),
        (lambda s: {"groups": s.register.groups * (MAX_PARTS + 1)}, "groups: expected 1 to"),
        (lambda s: {"groups": [s.register.groups[0] * (MAX_PARTS + 1)]}, "pieces: expected 1 to"),
        (lambda s: {"instance": -1}, "instance"),
        (lambda s: {"instance": 1 << 63}, "instance"),
        (lambda s: {"shard": b"short"}, "shard"),
        (lambda s: {"shard": bytes(32)}, "shard: expected [0-9a-f]{64} for these tensors"),
        (lambda s: {"part": ShardPart(index=1, count=2)}, "shard: expected"),
        (lambda s: {"part": ShardPart(index=3, count=2)}, "shard index"),
        (lambda s: {"part": ShardPart(layers=(("a",),))}, "shard: expected"),
        (lambda s: {"max_programs": 0}, "max_programs"),
        (lambda s: {"max_programs": -1}, "max_programs"),
        (lambda s: {"max_programs": 1 << 40}, "max_programs"),
    ],
)
def test_wrong_registrations_are_refused(server, change, message):
    assert_refused(
        server, lambda: msgspec.structs.replace(server.register, **change(server)), message
    )


def assert_refused(server, make, message):
    """By the server, or by whoever makes such a registration."""
    with pytest.raises((LayoutError, RemoteError), match=message) as caught:
        server.cache.request(make(), WAIT).result(WAIT)
    assert isinstance(caught.value, LayoutError) or caught.value.code == "bad_request"
    assert server.ask(Ping(instance=1)).registered is False
    assert_no_cache(server)


def assert_no_cache(server):
    assert server.ask(Settle(instance=1, transfers=[])), "what is being closed is waited for"
    assert server.cache.stats()["caches"] == 0
    assert server.cache.stats()["failed"] == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: {"share": ELSEWHERE}, "not there"),
        (lambda s: {"share": CpuShare(segment="passwd", nbytes=1536, offset=0)}, "arena name"),
        (lambda s: {"share": CudaShare(handle=bytes(64), device=CUDA_UUID, nbytes=1536, offset=0)},
         "CUDA driver|not visible"),
        (lambda s: {"share": PluginShare(backend="npu", handle=b"x", nbytes=1536, offset=0)},
         "device backend: expected one of"),
        (lambda s: {"dtype": "float16"}, "shard: expected"),
        (lambda s: {"dtype": "uint8", "shape": (BLOCKS, 4, 32), "strides": (128, 32, 1)},
         "shard: expected"),
        (lambda s: {"shape": (BLOCKS, 2, 32), "strides": (64, 32, 1)}, "shard: expected"),
        (lambda s: {"shape": (BLOCKS, 3, 16), "strides": (64, 16, 1)}, "block size 3"),
        (lambda s: {"shape": (BLOCKS, 4, 16), "strides": (16, 16, 1)}, "bytes do not overlap"),
        (lambda s: {"shape": (BLOCKS, 4, 8), "strides": (64, 16, 2)}, "dense dim"),
        (lambda s: {"shape": (0, 4, 16), "strides": (64, 16, 1)}, "no empty axis"),
    ],
)  # fmt: skip
def test_memory_that_is_not_what_it_should_be_is_refused(server, change, message):
    assert_refused(server, lambda: server.with_tensor(**change(server)), message)


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (AxesForm(axes="block dim token"), "dense dim"),
        (AxesForm(axes="token block dim"), "shard: expected|block size"),
        (AxesForm(axes="block head dim"), "shard: expected|block size"),
        (AxesForm(axes="block layer dim"), "shard: expected|block size"),
        (AxesForm(axes="block token dim", sizes={"token": 8}), "axis of token=8"),
        (AxesForm(axes="block token dim", tokens_per_state=2), "shard: expected"),
        (AxesForm(axes="layer plane | block token dim"), "list along"),
        (PagesForm(block_tokens=4, format="x"), "shard: expected"),
        (ArraysForm(block_tokens=4, widths=(16, 16)), "shard: expected"),
        (ArraysForm(block_tokens=4, widths=(1 << 20,)), "pages of at least"),
        (ArraysForm(block_tokens=4, widths=()), "rows: expected 1"),
    ],
)
def test_forms_that_read_something_else_are_refused(server, form, message):
    assert_refused(server, lambda: server.with_piece(form=form), message)


def test_the_arena_is_nobodys_cache(server):
    """A worker that could have the server copy into it could write what it has not stored."""
    registered = server.ask(Register(instance=9, shard=bytes(32), chunk_bytes=512))
    share = CpuShare(segment=registered.arena_name, nbytes=registered.arena_bytes, offset=0)
    assert_refused(server, lambda: server.with_tensor(share=share), "got the arena's")


def test_a_segment_of_another_size_is_refused(server):
    arena = Arena.create(4096)
    share = CpuShare(segment=arena.name, nbytes=8192, offset=0)
    assert_refused(
        server, lambda: server.with_tensor(share=share), "bytes: expected 8192, got 4096"
    )
    arena.close()


def test_a_cache_of_too_many_rows_is_refused(server):
    (tensor,) = server.register.groups[0][0].tensors
    many = TensorDescriptor(
        version=1, share=tensor.share, dtype="int16", shape=(2, MAX_ROWS // 2, 4), strides=(4, 0, 1)
    )
    piece = msgspec.structs.replace(
        server.register.groups[0][0], tensors=(many,), form=AxesForm(axes="block layer dim")
    )
    request = msgspec.structs.replace(server.register, groups=[(piece, piece, piece)])
    assert_refused(server, lambda: request, "rows: expected 1 to")


def test_chunks_that_do_not_fit_are_refused(server):
    """Every block is 128 bytes 100 times over: a chunk as large as the arena."""
    (tensor,) = server.register.groups[0][0].tensors
    wide = TensorDescriptor(
        version=1, share=tensor.share, dtype="int16", shape=(1, 5000, 8, 16), strides=(1, 0, 16, 1)
    )
    group = KVGroup.of(torch.zeros(1, 5000, 8, 16, dtype=torch.int16), "block layer token dim")
    layout = ChunkLayout.of([group.read()], CHUNK)
    request = msgspec.structs.replace(
        server.register,
        shard=ShardPart().shard(layout.fingerprint),
        groups=[group.share(iter([wide]))],
    )
    with pytest.raises(CapacityError, match=r"one chunk takes .*: make the arena larger"):
        server.ask(request)
    assert_no_cache(server)


def test_a_refused_registration_leaves_the_one_before(registered):
    code, _ = registered.ask(registered.with_piece(form=AxesForm(axes="block head dim")))
    assert code == "bad_request"
    assert registered.ask(load(registered, 2, 4)) == Loaded(chunks=4)


# --- transfers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [store, load])
@pytest.mark.parametrize(
    ("change", "code", "message"),
    [
        ({"blocks": []}, "bad_request", "one list for each of 1 groups, got 0"),
        ({"blocks": [bytes(32), bytes(32)]}, "bad_request", "got 2"),
        ({"blocks": [bytes(28)]}, "bad_request", "4 chunks need 8 blocks, got 7"),
        ({"blocks": [b""]}, "bad_request", "got 0"),
        ({"blocks": [bytes(31)]}, "bad_request", "4 bytes an id, got 31"),
        ({"blocks": [b"\xff\xff\xff\x7f" * 8]}, "bad_request", "got 2147483647"),
        ({"blocks": [b"\x00\x00\x00\x80" * 8]}, "bad_request", "got -2147483648"),
        ({"blocks": [b"\x0c\x00\x00\x00" * 8]}, "bad_request", "got 12"),
        ({"digests": bytes(33)}, "bad_request", "digests"),
        ({"digests": bytes(32 * (MAX_CHUNKS + 1))}, "bad_request", "digests"),
        ({"event": bytes(64)}, "bad_request", "event: expected a handle of 0 bytes"),
        ({"event": b"x"}, "bad_request", "event"),
        ({"transfer": -1}, "bad_request", "transfer"),
        ({"transfer": 1 << 63}, "bad_request", "transfer"),
        ({"instance": 2}, "unknown_instance", "register again"),
        ({"instance": -1}, "bad_request", "instance"),
    ],
)
def test_mp_096_mp_d26_wrong_transfers_hold_nothing(registered, make, change, code, message):
    """Whatever is wrong, too few block ids among it, no chunk stays leased or reserved."""
    before = registered.tensor.clone()
    stats = registered.cache.stats()
    first = {"first": 4} if make is store else {}
    request = msgspec.structs.replace(make(registered, 2, 4, **first), **change)
    got = registered.ask(request)
    assert got[0] == code
    assert message in got[1]
    assert registered.idle()
    after = registered.cache.stats()
    assert {**after, "refused": 0} == {**stats, "refused": 0}
    assert torch.equal(registered.tensor, before)
    assert registered.ask(load(registered, 3, 4)) == Loaded(chunks=4)


@pytest.mark.parametrize("tenant", ["a/b", "a@b", "a\\b", "a\0b", "x" * 129])
def test_a_tenant_that_cannot_be_stores_nothing(registered, tenant):
    before = registered.cache.stats()
    code, text = registered.ask(store(registered, 2, 2, first=4, tenant=tenant))
    assert (code, "tenant: expected <= 128" in text) == ("bad_request", True)
    assert registered.cache.stats() == before | {"refused": before["refused"] + 1}


def test_wrong_loads_are_refused(registered):
    code, text = registered.ask(load(registered, 2, 4, skip_tokens=-1))
    assert (code, "skip_tokens" in text) == ("bad_request", True)
    twice = registered.blocks(0, 1, 2, 3, 4, 5, 6, 6)
    code, text = registered.ask(load(registered, 3, 4, blocks=twice))
    assert (code, "named twice" in text) == ("bad_request", True)
    everything = load(registered, 4, 4, skip_tokens=1 << 62)
    before = registered.tensor.clone()
    assert registered.ask(everything) == Loaded(chunks=4)
    assert torch.equal(registered.tensor, before)
    assert registered.idle()


def test_a_tail_of_blocks_is_ignored_and_absent_ones_are_left_alone(registered):
    ids = registered.blocks(8, -1, 9, 10, -7, 99)
    assert registered.ask(load(registered, 2, 2, blocks=ids)) == Loaded(chunks=2)
    assert registered.tensor[:, 0, 0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 0, 2, 3, 11]
    code, text = registered.ask(store(registered, 3, 1, first=6, blocks=registered.blocks(-1, 2)))
    assert (code, "got -1" in text) == ("bad_request", True)


@pytest.mark.parametrize("transfers", [[-1], [1, 1 << 63], list(range(5000))], ids=len)
def test_wrong_ids_cannot_be_settled(registered, transfers):
    assert registered.ask(Settle(instance=1, transfers=transfers))[0] == "bad_request"


def test_a_ticket_is_its_owners_and_only_once(registered):
    copied = registered.ask(store(registered, 2, 2, first=4))
    for instance, ticket in ((2, copied.ticket), (1, copied.ticket + 1), (1, 0), (1, 1 << 62)):
        code, _ = registered.ask(CommitStore(instance=instance, ticket=ticket))
        assert code in ("unknown_ticket", "unknown_instance")
    registered.ask(CommitStore(instance=1, ticket=copied.ticket))
    code, _ = registered.ask(CommitStore(instance=1, ticket=copied.ticket))
    assert code == "unknown_ticket"
    assert registered.idle()


HOSTILE_IDS = st.sampled_from([0, 1, 5, 11, 12, -1, -2, 2**31 - 1, -(2**31)])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_transfer_is_answered_and_holds_nothing(registered_forever, data):
    """Random ids, digests and counts, many of them wrong: a typed answer, and every slot idle."""
    server = registered_forever
    storing = data.draw(st.booleans())
    chunks = data.draw(st.integers(0, 4))
    ids = data.draw(st.lists(HOSTILE_IDS, max_size=10))
    digests = b"".join(data.draw(st.sampled_from(DIGESTS)) for _ in range(chunks))
    message = (StoreBlocks if storing else LoadBlocks)(
        instance=data.draw(st.sampled_from([1, 1, 1, 2])),
        transfer=random.getrandbits(62),
        digests=digests,
        blocks=[np.array(ids, dtype="<i4").tobytes()] * data.draw(st.sampled_from([1, 1, 1, 0, 2])),
    )
    reply = server.ask(message)
    if isinstance(reply, Copied):
        if reply.chunks:
            end = data.draw(st.sampled_from([CommitStore, AbortStore]))
            assert server.ask(end(instance=1, ticket=reply.ticket)) == Done()
    else:
        assert isinstance(reply, Loaded) or reply[0] in ("bad_request", "unknown_instance")
    assert server.idle()
    assert server.cache.stats()["failed"] == 0


@pytest.fixture(scope="module")
def registered_forever():
    made = Server()
    made.ask(made.register)
    yield made
    made.cache.close()


def test_two_workers_of_one_shard_share_and_of_two_do_not(registered):
    """What names a chunk is what the server has computed, never what a worker says."""
    other = msgspec.structs.replace(registered.register, instance=2)
    registered.ask(other)
    shared = load(registered, 1, 4, instance=2)
    assert registered.ask(shared) == Loaded(chunks=4)
    part = ShardPart(index=1, count=2)
    third = msgspec.structs.replace(
        registered.register,
        instance=3,
        part=part,
        shard=part.shard(registered.layout.fingerprint),
    )
    registered.ask(third)
    assert registered.ask(load(registered, 1, 4, instance=3)) == Loaded(chunks=0)
    assert registered.ask(
        load(
            registered,
            1,
            4,
            instance=2,
            digests=secrets.token_bytes(32),
            blocks=registered.blocks(0, 1),
        )
    ) == Loaded(chunks=0)
