"""Host memory and a real GPU: pinned beside the work, or not at all, bytes come out the same."""

from __future__ import annotations

import ctypes
import mmap
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
import torch
from cachekit import BY_NAME, make_cache, oracle_chunk
from transfer_suite import CHUNK_TOKENS, WAIT, load, names, plain_context, store

from lmcache_kernels import LayoutError, copy_blocks
from lmcache_kernels.adapters.messaging.client import CacheClient
from lmcache_kernels.adapters.server.spawn import spawn_server
from lmcache_kernels.transfer.engine_driven import attachment
from lmcache_kernels.transfer.memory import pinning
from lmcache_kernels.transfer.memory.arena import Arena
from lmcache_kernels.transfer.memory.pinning import PinnedRegion
from lmcache_kernels.transfer.moving.cuda_host import CudaHostMemory
from lmcache_kernels.views import plane_of

pytestmark = pytest.mark.gpu

DEVICE = "cuda:0"
PIECE = 1 << 16


@pytest.fixture
def arena():
    made = Arena.create(8 * PIECE)
    yield made
    made.close()


@pytest.fixture
def engine():
    """A cache whose chunks are larger than a piece, and what makes a context for it."""
    cache = make_cache(BY_NAME["latent"], layers=4, blocks=40, dim=2048, device=DEVICE)
    cache.fill_random(21)
    with spawn_server(size_gb=0.02, chunk_size=CHUNK_TOKENS) as server:
        client = CacheClient(server.url, chunk_tokens=CHUNK_TOKENS)
        client.wait_ready(WAIT)
        contexts = []

        def context():
            contexts.append(plain_context(cache, client))
            assert contexts[-1].layout.nbytes > PIECE
            return contexts[-1]

        yield cache, context
        for one in contexts:
            one.close()
        client.close()


def host(address, nbytes):
    return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)


def pinning_is_over():
    for thread in threading.enumerate():
        if thread.name == "lmcache-kernels-pin":
            thread.join(WAIT)


def round_trip(cache, context):
    """Stores ten chunks and loads them into other blocks."""
    ids, to = list(range(20)), list(range(20, 40))
    digests = names(10)
    assert store(context, digests, ids) == 10
    assert load(context, digests, to) == 10
    assert torch.equal(oracle_chunk(cache, to), oracle_chunk(cache, ids))


def test_pieces_are_registered_used_and_given_back(arena, monkeypatch):
    """A registration that is still there would refuse to be made again."""
    monkeypatch.setattr(pinning, "PIECE_BYTES", PIECE)
    expected = torch.arange(8 * PIECE, device=DEVICE).to(torch.uint8)
    for _ in range(3):
        region = PinnedRegion(arena.address, arena.nbytes)
        assert region.wait_for(arena.address, arena.nbytes, WAIT)
        assert region.pinned
        for piece in range(8):
            part = slice(piece * PIECE, (piece + 1) * PIECE)
            host(arena.address, arena.nbytes)[part].copy_(expected[part], non_blocking=True)
        torch.cuda.current_stream().synchronize()
        assert torch.equal(host(arena.address, arena.nbytes), expected.cpu())
        registry = CudaHostMemory()
        for piece in range(8):
            assert registry.register(arena.address + piece * PIECE, PIECE) == 712  # already
            registry.forget_error()
        region.close()


def test_fault_f07_kernels_write_where_the_runtime_says(arena, monkeypatch):
    """The device's address of registered memory, at an offset and across two pieces."""
    monkeypatch.setattr(pinning, "PIECE_BYTES", PIECE)
    region = PinnedRegion(arena.address, arena.nbytes)
    assert region.wait_for(arena.address, arena.nbytes, WAIT)
    offset, nbytes = PIECE - 4096, 8192
    address = region.device_address(arena.address + offset, nbytes)
    assert address is not None
    cache = torch.arange(4 * nbytes, device=DEVICE).to(torch.uint8).view(4, 1, nbytes)
    source = plane_of(cache, "block token dim")
    there = replace(source, bases=(address,), num_blocks=1)
    copy_blocks(there, [0], source, [2])
    torch.cuda.current_stream().synchronize()
    assert torch.equal(host(arena.address + offset, nbytes), cache[2, 0].cpu())
    assert not host(arena.address, offset).any()
    region.close()
    assert region.device_address(arena.address + offset, nbytes) is None


def test_where_the_runtime_has_host_addresses_it_says_the_same_when_asked(arena):
    registry = CudaHostMemory()
    assert registry.register(arena.address, arena.nbytes) == 0
    if registry.same_addresses():
        assert registry.device_address(arena.address + 512) == arena.address + 512
    assert registry.unregister(arena.address) == 0
    assert registry.device_address(arena.address) in (0, arena.address)
    assert torch.zeros(8, device=DEVICE).add_(1).sum().item() == 8, "no error is left"


@pytest.mark.parametrize("pinned", [False, True])
def test_fault_f06_host_tensors_are_refused_by_name_and_pinned_ones_taken_by_address(pinned):
    """Slices with an offset: a CPU plane is an error that names the side, and no byte moves."""
    whole = torch.zeros(4 + 2 * 4 * 256, dtype=torch.uint8, pin_memory=pinned)
    host_side = whole[4:].view(2, 4, 256)
    gpu_side = torch.arange(2 * 4 * 256, device=DEVICE).to(torch.uint8).view(2, 4, 256)
    to, origin = plane_of(host_side, "block token dim"), plane_of(gpu_side, "block token dim")
    with pytest.raises(LayoutError, match="destination on cpu"):
        copy_blocks(to, [0], origin, [1])
    with pytest.raises(LayoutError, match="source on cpu"):
        copy_blocks(origin, [0], to, [1])
    assert not whole.any()
    if pinned:
        copy_blocks(replace(to, device=DEVICE), [0], origin, [1])
        torch.cuda.current_stream().synchronize()
        assert torch.equal(host_side[0], gpu_side[1].cpu())
        assert not whole[:4].any()
        assert not host_side[1].any()


def test_fault_f09_refused_memory_costs_a_warning_and_leaves_no_error_behind(caplog):
    """CUDA hands the error of a failed registration to whoever asks next: a kernel launch."""
    region = PinnedRegion(1 << 46, mmap.PAGESIZE)  # nothing is mapped there
    assert not region.wait_for(1 << 46, mmap.PAGESIZE, WAIT)
    region.close()
    pinning_is_over()
    assert not region.pinned
    assert len([r for r in caplog.records if "could not pin" in r.getMessage()]) == 1
    assert torch.zeros(8, device=DEVICE).add_(1).sum().item() == 8


@pytest.mark.parametrize("works", [0, 3])
def test_fault_f09_an_engine_whose_arena_cannot_be_pinned_stores_and_loads(
    engine, monkeypatch, caplog, works
):
    """Not at all, or the first pieces only: those are given back, and bytes are right throughout."""
    monkeypatch.setattr(pinning, "PIECE_BYTES", PIECE)
    asked, register = [], CudaHostMemory.register

    def refuses_some(registry, address, nbytes):
        asked.append(address)
        return 2 if len(asked) > works else register(registry, address, nbytes)

    monkeypatch.setattr(CudaHostMemory, "register", refuses_some)
    cache, make = engine
    context = make()
    round_trip(cache, context)
    cache.fill_random(22)
    round_trip(cache, context)
    pinning_is_over()
    assert len([r for r in caplog.records if "could not pin" in r.getMessage()]) == 1


def test_an_arena_is_used_before_while_and_after_it_is_registered(engine, monkeypatch):
    """Copies of memory that is not registered yet are slower, not wrong; nor are those meanwhile."""
    monkeypatch.setattr(pinning, "PIECE_BYTES", PIECE)
    monkeypatch.setattr(attachment, "PIN_PATIENCE", 0.01)
    allowed, register = threading.Event(), CudaHostMemory.register
    regions = []

    def when_allowed(registry, address, nbytes):
        assert allowed.wait(WAIT)
        return register(registry, address, nbytes)

    class Watched(PinnedRegion):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            regions.append((self, arguments[:2]))

    monkeypatch.setattr(CudaHostMemory, "register", when_allowed)
    monkeypatch.setattr(attachment, "PinnedRegion", Watched)
    cache, make = engine
    context = make()
    round_trip(cache, context)
    ((region, whole),) = regions
    assert not region.pinned
    allowed.set()
    cache.fill_random(23)
    round_trip(cache, context)
    assert region.wait_for(*whole, WAIT)
    cache.fill_random(24)
    round_trip(cache, context)


def test_closing_while_the_arena_is_being_registered(engine, monkeypatch):
    monkeypatch.setattr(pinning, "PIECE_BYTES", PIECE)
    cache, make = engine
    for _ in range(5):
        context = make()
        context.register()
        context.close()
    round_trip(cache, make())


def test_memory_is_registered_by_a_gpu_that_the_process_uses_already():
    """A context on another one would take half a GB of its memory."""
    script = """
import ctypes, threading, torch
last = torch.cuda.device_count() - 1
torch.zeros(1, device=f"cuda:{last}")
from lmcache_kernels.transfer.memory.arena import Arena
from lmcache_kernels.transfer.memory.pinning import PinnedRegion
arena = Arena.create(1 << 20)
made = []
maker = threading.Thread(
    target=lambda: made.append(PinnedRegion(arena.address, arena.nbytes))
)
maker.start()
maker.join()
(region,) = made
assert region.wait_for(arena.address, arena.nbytes, 30)
driver, flags, active = ctypes.CDLL("libcuda.so.1"), ctypes.c_uint(), ctypes.c_int()
used = []
for device in range(last + 1):
    driver.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active))
    used.append(active.value)
assert used == [0] * last + [1], used
region.close()
arena.close()
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr
