"""Registration in the background, against a CUDA that is made up: order, borders, failure, end."""

from __future__ import annotations

import subprocess
import sys
import threading
from contextlib import nullcontext
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_kernels.errors import LayoutError
from lmcache_kernels.transfer.engine_driven import attachment as attachment_module
from lmcache_kernels.transfer.engine_driven.attachment import Attachment
from lmcache_kernels.transfer.memory import pinning
from lmcache_kernels.transfer.memory.arena import Arena
from lmcache_kernels.transfer.memory.pinning import PinnedRegion
from lmcache_kernels.transfer.memory.slot_header import HEADER_BYTES
from lmcache_kernels.transfer.messages import Registered
from lmcache_kernels.transfer.moving import cuda_host

WAIT = 30.0
PIECE = 1 << 20
BASE = 7 << 40
"""Nothing is there: whoever touched it would crash."""

NO_MEMORY = 2  # cudaErrorMemoryAllocation
ALREADY = 712  # cudaErrorHostMemoryAlreadyRegistered


class FakeCuda:
    """Remembers what is registered, refuses what real drivers refuse, keeps errors as CUDA does.

    Args:
        limit: registrations of so many bytes or more fail.
        answers: codes of single registrations by their number, from 0 on.
        gated: each registration waits for an :meth:`allow`.
        shift: kernels find memory so far behind the host's address; None: at the same.
    """

    def __init__(self, *, limit=1 << 60, answers=None, gated=False, shift=None):
        self.limit = limit
        self.answers = answers or {}
        self.shift = shift
        self.registered: dict[int, int] = {}
        self.calls: list[tuple[str, int]] = []
        self.error = 0
        self.asked_where: list[int] = []
        self._began = threading.Semaphore(0)
        self._allowed = threading.Semaphore(0) if gated else None

    def register(self, address, nbytes):
        number = sum(call == "register" for call, _ in self.calls)
        self.calls.append(("register", address))
        self._began.release()
        if self._allowed is not None:
            assert self._allowed.acquire(timeout=WAIT)
        code = self.answers.get(number, 0)
        if nbytes >= self.limit:
            code = NO_MEMORY
        if code:
            self.error = code
        else:
            assert all(
                address + nbytes <= start or start + size <= address
                for start, size in self.registered.items()
            )
            self.registered[address] = nbytes
        return code

    def unregister(self, address):
        self.calls.append(("unregister", address))
        del self.registered[address]
        return 0

    def forget_error(self):
        self.error = 0

    def same_addresses(self):
        return self.shift is None

    def device_address(self, address):
        self.asked_where.append(address)
        return address + self.shift

    # --- for tests --------------------------------------------------------------------------------

    def allow(self, count=1):
        self._allowed.release(count)

    def begun(self):
        """Waits until one registration more has begun."""
        assert self._began.acquire(timeout=WAIT)

    def addresses(self, call):
        return [address for name, address in self.calls if name == call]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(pinning, "PIECE_BYTES", PIECE)


@pytest.fixture
def pinned():
    """Makes regions and closes them."""
    made = []

    def make(cuda, nbytes=10 * PIECE, **options):
        made.append(PinnedRegion(BASE, nbytes, cuda, **options))
        return made[-1]

    yield make
    for region in made:
        region.close()


def ended(region, nbytes=10 * PIECE):
    """Waits until nothing is registered any more; whether all of it is."""
    return region.wait_for(BASE, nbytes, WAIT)


def gone(cuda):
    """Waits, with the thread that does it, until nothing is registered."""
    for thread in threading.enumerate():
        if thread.name == "lmcache-kernels-pin":
            thread.join(WAIT)
    return cuda.registered == {}


# --- pieces ---------------------------------------------------------------------------------------


def test_fault_f04_no_registration_is_larger_than_a_piece(pinned, monkeypatch) -> None:
    """A pool of more than drivers register at once, 600 GiB, and its end that is no whole piece."""
    monkeypatch.setattr(pinning, "PIECE_BYTES", 1 << 30)
    cuda, nbytes = FakeCuda(limit=512 << 30), (600 << 30) + 12345
    region = pinned(cuda, nbytes)
    assert ended(region, nbytes)
    assert region.pinned
    assert max(cuda.registered.values()) == 1 << 30
    assert sorted(cuda.registered) == [BASE + (n << 30) for n in range(601)]
    assert sum(cuda.registered.values()) == nbytes
    region.close()
    assert cuda.registered == {}
    assert cuda.addresses("unregister") == cuda.addresses("register")[::-1]


def test_fault_f08_as_much_is_pinned_as_was_asked_for(pinned) -> None:
    """Not rounded up to whole pieces, let alone to a power of two."""
    nbytes = 5 * PIECE + 4096
    cuda = FakeCuda()
    assert ended(pinned(cuda, nbytes), nbytes)
    assert sum(cuda.registered.values()) == nbytes


@given(st.data())
def test_no_cut_copy_spans_two_registrations(data) -> None:
    nbytes = data.draw(st.integers(1, 5 * PIECE))
    start = data.draw(st.integers(0, nbytes - 1))
    size = data.draw(st.integers(1, nbytes - start))
    cuda = FakeCuda()
    region = PinnedRegion(BASE, nbytes, cuda)
    early = region.cuts(BASE + start, size)
    assert ended(region, nbytes)
    assert region.cuts(BASE + start, size) == early, "whatever is registered already"
    edges = [0, *early, size]
    assert edges == sorted(set(edges))
    for begin, end in pairwise(edges):
        inside = [
            address
            for address, length in cuda.registered.items()
            if address <= BASE + start + begin and BASE + start + end <= address + length
        ]
        assert len(inside) == 1
    assert len(early) == (start + size - 1) // PIECE - start // PIECE, "no more than needed"
    region.close()


@pytest.mark.parametrize(
    ("offset", "nbytes"), [(-1, 2), (0, 0), (0, -1), (10 * PIECE, 1), (1, 1 << 70)]
)
def test_ranges_outside_are_refused(pinned, offset: int, nbytes: int) -> None:
    region = pinned(FakeCuda())
    for ask in (region.cuts, region.device_address, lambda *at: region.wait_for(*at, WAIT)):
        with pytest.raises(LayoutError, match=f"{nbytes} at {offset}"):
            ask(BASE + offset, nbytes)


# --- while it goes on -----------------------------------------------------------------------------


def test_making_a_region_does_not_wait_and_each_piece_can_be_used_when_it_is_there(pinned) -> None:
    cuda = FakeCuda(gated=True)
    region = pinned(cuda)
    cuda.begun()
    assert not region.wait_for(BASE, 1, 0.0)
    assert not region.pinned
    cuda.allow()
    assert region.wait_for(BASE, PIECE, WAIT)
    assert not region.wait_for(BASE, PIECE + 1, 0.0), "the second piece is not"
    assert not region.pinned
    cuda.allow(9)
    assert ended(region)
    assert region.pinned


def test_what_is_waited_for_comes_next(pinned) -> None:
    cuda = FakeCuda(gated=True)
    region = pinned(cuda)
    cuda.begun()
    assert not region.wait_for(BASE + 7 * PIECE - 1, 2, 0.0)  # pieces 6 and 7
    cuda.allow(3)
    assert region.wait_for(BASE + 7 * PIECE - 1, 2, WAIT)
    cuda.allow(7)
    assert ended(region)
    order = [(address - BASE) // PIECE for address in cuda.addresses("register")]
    assert order == [0, 6, 7, 1, 2, 3, 4, 5, 8, 9]
    region.close()
    assert cuda.addresses("unregister") == cuda.addresses("register")[::-1]


def test_waiting_is_bounded(pinned) -> None:
    cuda = FakeCuda(gated=True)
    region = pinned(cuda)
    assert not region.wait_for(BASE, 1, 0.02)
    cuda.allow(10)


def test_many_may_wait_for_the_same(pinned) -> None:
    cuda = FakeCuda(gated=True)
    region = pinned(cuda)
    found = []
    waiting = [
        threading.Thread(target=lambda: found.append(region.wait_for(BASE + 3 * PIECE, 5, WAIT)))
        for _ in range(8)
    ]
    for thread in waiting:
        thread.start()
    cuda.allow(10)
    for thread in waiting:
        thread.join(WAIT)
    assert found == [True] * 8
    assert len(cuda.addresses("register")) == len(set(cuda.addresses("register")))


# --- failure --------------------------------------------------------------------------------------


@pytest.mark.parametrize("failing", [0, 1, 6, 9])
def test_fault_f04_a_failure_gives_back_what_was_registered(pinned, caplog, failing: int) -> None:
    """In reverse order, each piece at the address that it was registered at; no error stays."""
    cuda = FakeCuda(answers={failing: NO_MEMORY})
    region = pinned(cuda)
    assert not ended(region)
    assert gone(cuda)
    assert not region.pinned
    assert cuda.addresses("unregister") == cuda.addresses("register")[:failing][::-1]
    assert len(cuda.addresses("register")) == failing + 1, "and nothing more is tried"
    assert cuda.error == 0
    assert not region.wait_for(BASE, 1, WAIT)
    region.close()
    assert len(cuda.addresses("unregister")) == failing


def test_fault_f04_registrations_above_a_limit_of_the_driver(pinned, caplog) -> None:
    """The driver refuses pieces of this size: nothing is pinned, and nothing stays behind."""
    cuda = FakeCuda(limit=PIECE)
    region = pinned(cuda, 10 * PIECE - 1)
    assert not ended(region, 10 * PIECE - 1)
    assert gone(cuda)
    assert cuda.error == 0


def test_fault_f04_what_is_in_use_is_given_back_later(pinned) -> None:
    """A copy may be under way through the pieces that did work."""
    later = []
    cuda = FakeCuda(answers={3: NO_MEMORY})
    region = pinned(cuda, when_unused=later.append)
    assert not ended(region)
    assert not gone(cuda)
    assert len(cuda.registered) == 3
    assert region.wait_for(BASE, 3 * PIECE, 0.0)
    (give_back,) = later
    give_back()
    assert cuda.registered == {}
    assert not region.wait_for(BASE, 1, 0.0)
    region.close()
    give_back()
    assert len(cuda.addresses("unregister")) == 3


def test_fault_f09_one_warning_names_limit_and_need(pinned, caplog, monkeypatch) -> None:
    """Pinning is impossible: one warning, and whoever asks afterwards gets an answer at once."""
    monkeypatch.setattr(pinning.resource, "getrlimit", lambda _: (64 << 10, 64 << 10))
    cuda = FakeCuda(answers={4: NO_MEMORY})
    region = pinned(cuda)
    assert not ended(region)
    assert gone(cuda)
    for _ in range(100):
        assert not region.wait_for(BASE, 10 * PIECE, WAIT)
    (record,) = caplog.records
    message = record.getMessage()
    assert "could not pin host memory: CUDA error 2 after 4 of 10 MiB" in message
    assert "Needed are 10240 KiB" in message
    assert "ulimit -l) is 64 KiB" in message


def test_fault_f09_under_a_real_limit_on_locked_memory() -> None:
    """A CUDA that locks memory as drivers do, in a process that may lock 64 KiB."""
    script = """
import ctypes, logging, mmap, os, resource, sys, threading
from lmcache_kernels.transfer.memory import pinning
from lmcache_kernels.transfer.memory.pinning import PinnedRegion

if os.geteuid() == 0:
    os.setuid(65534)  # root may lock what it likes
resource.setrlimit(resource.RLIMIT_MEMLOCK, (64 << 10, 64 << 10))
library = ctypes.CDLL(None)
library.mlock.argtypes = library.munlock.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
pinning.PIECE_BYTES = 16 << 10

class Locking:
    sizes = {}
    def register(self, address, nbytes):
        if library.mlock(address, nbytes):
            return 2
        self.sizes[address] = nbytes
        return 0
    def unregister(self, address):
        return library.munlock(address, self.sizes.pop(address))
    def forget_error(self):
        pass
    def same_addresses(self):
        return True

def locked():
    lines = open("/proc/self/status").read().split()
    return int(lines[lines.index("VmLck:") + 1]) << 10

logging.basicConfig(format="%(message)s")
memory = mmap.mmap(-1, int(sys.argv[1]))
region = PinnedRegion(ctypes.addressof(ctypes.c_char.from_buffer(memory)), len(memory), Locking())
whole = region.wait_for(ctypes.addressof(ctypes.c_char.from_buffer(memory)), len(memory), 30)
for thread in threading.enumerate():
    if thread.name == "lmcache-kernels-pin":
        thread.join(30)
print(whole, region.pinned, locked())
region.close()
assert locked() == 0
memory[:3] = b"use"
"""
    for nbytes, outcome in ((64 << 10, "True True 65536"), (96 << 10, "False False 0")):
        done = subprocess.run(
            [sys.executable, "-c", script, str(nbytes)], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() == outcome
        assert done.stderr.count("is 64 KiB") == (outcome == "False False 0"), done.stderr


def test_a_registration_that_is_there_already_may_be_of_other_memory(pinned, caplog) -> None:
    """CUDA keeps registrations by address; what was mapped there before may be gone."""
    cuda = FakeCuda(answers={2: ALREADY})
    region = pinned(cuda)
    assert not ended(region)
    assert gone(cuda)
    assert cuda.error == 0
    assert BASE + 2 * PIECE not in cuda.addresses("unregister")
    assert len(cuda.addresses("unregister")) == 2
    assert "CUDA error 712" in caplog.text


@pytest.mark.parametrize("code", [900, 901])
def test_while_somebody_captures_a_graph_registration_is_put_off(
    pinned, caplog, monkeypatch, code
) -> None:
    """An engine captures its graphs just after it has registered its caches."""
    monkeypatch.setattr(pinning, "RETRY_SECONDS", 0.001)
    cuda = FakeCuda(answers={2: code, 3: code, 7: code})
    region = pinned(cuda)
    assert ended(region)
    assert cuda.error == 0
    assert len(cuda.registered) == 10
    assert not caplog.records


def test_a_capture_without_an_end_does_not_keep_a_region_from_closing(pinned) -> None:
    cuda = FakeCuda(answers=dict.fromkeys(range(1000), 900))
    region = pinned(cuda)
    cuda.begun()
    region.close()
    assert cuda.registered == {}


def test_what_comes_after_closing_waits_for_a_registration_under_way(pinned, monkeypatch) -> None:
    """The memory must stay mapped while CUDA is at work on it."""
    monkeypatch.setattr(pinning, "CLOSE_SECONDS", 0.01)
    cuda = FakeCuda(gated=True)
    region = pinned(cuda)
    cuda.begun()
    gone = threading.Event()
    region.close(gone.set)
    assert not gone.is_set()
    cuda.allow(20)
    assert gone.wait(WAIT)
    assert cuda.registered == {}


def test_memory_that_cuda_keeps_is_never_let_go(pinned, caplog) -> None:
    class Keeping(FakeCuda):
        def unregister(self, address):
            super().unregister(address)
            return 1

    region = pinned(Keeping())
    assert ended(region)
    gone = threading.Event()
    region.close(gone.set)
    assert not gone.is_set()
    assert "its mapping stays" in caplog.text


# --- the end --------------------------------------------------------------------------------------


def test_closing_ends_a_registration_that_is_under_way(pinned) -> None:
    cuda = FakeCuda(gated=True)
    region = pinned(cuda)
    cuda.begun()
    cuda.allow()
    cuda.begun()  # the second
    closing = threading.Thread(target=region.close)
    closing.start()
    while not region._stopped:
        threading.Event().wait(0)
    cuda.allow(10)
    closing.join(WAIT)
    assert not closing.is_alive()
    assert cuda.registered == {}
    assert len(cuda.addresses("register")) == 2, "the rest was not begun"
    assert cuda.addresses("unregister") == [BASE + PIECE, BASE]
    assert not region.wait_for(BASE, 1, WAIT)
    region.close()
    assert gone(cuda)


def test_closing_does_not_wait_for_ever_and_what_comes_late_is_given_back(
    pinned, caplog, monkeypatch
) -> None:
    monkeypatch.setattr(pinning, "CLOSE_SECONDS", 0.02)
    cuda = FakeCuda(gated=True)
    region = pinned(cuda)
    cuda.begun()
    region.close()
    assert "still registers" in caplog.text
    cuda.allow(10)
    assert gone(cuda)
    assert cuda.calls == [("register", BASE), ("unregister", BASE)]


def test_a_registry_that_breaks_leaves_nobody_waiting(pinned) -> None:
    class Broken(FakeCuda):
        def same_addresses(self):
            raise RuntimeError("no such attribute")

    caught = []
    before, threading.excepthook = threading.excepthook, caught.append
    try:
        region = pinned(Broken())
        assert not ended(region)
        gone(FakeCuda())
    finally:
        threading.excepthook = before
    assert len(caught) == 1


# --- where kernels find it ------------------------------------------------------------------------


def test_fault_f07_kernels_get_the_address_that_the_runtime_says(pinned) -> None:
    """The device has registered memory elsewhere: offsets count from its address, in every piece."""
    cuda = FakeCuda(shift=0x1000)
    region = pinned(cuda)
    assert ended(region)
    assert cuda.asked_where == cuda.addresses("register"), "asked once, for each registration"
    for offset, nbytes in ((0, 1), (4096 + 17, 512), (3 * PIECE - 1, 1), (9 * PIECE + 5, 16)):
        assert region.device_address(BASE + offset, nbytes) == BASE + 0x1000 + offset
    for offset, nbytes in ((0, 10 * PIECE), (PIECE // 2, 5 * PIECE)):
        assert region.device_address(BASE + offset, nbytes) == BASE + 0x1000 + offset


@pytest.mark.parametrize(
    ("attribute", "code", "shift"), [(1, 0, 0), (0, 0, 0x1000), (0, 1, 0x1000), (1, 1, 0x1000)]
)
def test_fault_f07_the_runtime_is_asked_whether_the_hosts_address_will_do(
    pinned, monkeypatch, attribute: int, code: int, shift: int
) -> None:
    """A CUDA runtime of made-up functions: the device's attribute decides, if it can be had."""

    class Cudart:
        def cudaHostRegister(self, address, nbytes, flags):  # noqa: N802
            return 0

        def cudaHostUnregister(self, address):  # noqa: N802
            return 0

        def cudaGetLastError(self):  # noqa: N802
            return 0

        def cudaThreadExchangeStreamCaptureMode(self, mode):  # noqa: N802
            mode._obj.value = 0

        def cudaDeviceGetAttribute(self, out, which, device):  # noqa: N802
            assert (which, device) == (91, 3)
            out._obj.value = attribute
            return code

        def cudaHostGetDevicePointer(self, out, address, flags):  # noqa: N802
            out._obj.value = address + 0x1000
            return 0

    monkeypatch.setattr(cuda_host, "host_runtime", Cudart)
    monkeypatch.setattr(cuda_host, "_device_in_use", lambda: 3)
    monkeypatch.setattr(cuda_host.torch.cuda, "device", lambda _: nullcontext())
    region = pinned(cuda_host.CudaHostMemory())
    assert ended(region)
    for offset, nbytes in ((17, 16), (PIECE + 4096, 512), (PIECE // 2, 8 * PIECE)):
        assert region.device_address(BASE + offset, nbytes) == BASE + shift + offset
    region.close()


def test_fault_f07_where_host_addresses_work_nobody_asks(pinned) -> None:
    cuda = FakeCuda()
    region = pinned(cuda)
    assert ended(region)
    assert region.device_address(BASE + 77, 3 * PIECE) == BASE + 77
    assert cuda.asked_where == []


def test_fault_f07_pieces_that_lie_apart_for_the_device_have_no_common_address(pinned) -> None:
    """Each piece can be reached, but no kernel may run over the border."""

    class Apart(FakeCuda):
        def device_address(self, address):
            return 1 << 50 if address == BASE + PIECE else address

    region = pinned(Apart(shift=0), 3 * PIECE)
    assert ended(region, 3 * PIECE)
    assert region.device_address(BASE, PIECE) == BASE
    assert region.device_address(BASE + PIECE + 8, 8) == (1 << 50) + 8
    assert region.device_address(BASE + PIECE - 1, 2) is None
    assert region.device_address(BASE, 3 * PIECE) is None


def test_what_is_not_registered_has_no_address_for_kernels(pinned) -> None:
    cuda = FakeCuda(gated=True)
    region = pinned(cuda)
    cuda.allow(2)
    assert region.wait_for(BASE, 2 * PIECE, WAIT)
    assert region.device_address(BASE, 2 * PIECE) == BASE
    assert region.device_address(BASE, 2 * PIECE + 1) is None
    assert region.device_address(BASE + 5 * PIECE, 1) is None
    cuda.allow(8)


def test_memory_that_the_device_has_nowhere_is_still_good_for_copies(pinned) -> None:
    class Nowhere(FakeCuda):
        def device_address(self, address):
            return 0

    region = pinned(Nowhere(shift=0))
    assert ended(region)
    assert region.device_address(BASE, 1) is None


# --- an arena that is attached --------------------------------------------------------------------

PAYLOAD = PIECE


@pytest.fixture
def attached(monkeypatch):
    """Attaches an arena of four pieces whose memory a made-up CUDA registers."""
    arena = Arena.create(4 * PIECE)
    made = []

    def make(cuda):
        monkeypatch.setattr(cuda_host, "CudaHostMemory", lambda: cuda)
        registered = Registered(arena_name=arena.name, arena_bytes=arena.nbytes)
        made.append(
            Attachment(
                registered, incarnation="1", shard=bytes(32), payload_bytes=PAYLOAD, pin=True
            )
        )
        return made[-1]

    yield make
    for one in made:
        one.retire()
    arena.close()


def test_a_move_waits_for_its_own_memory_and_is_cut_at_the_border(attached) -> None:
    cuda = FakeCuda(gated=True)
    arena = attached(cuda)
    cuda.begun()
    moving = []
    waits = threading.Thread(target=lambda: moving.append(arena.move(2 * PIECE, ((1,),))))
    waits.start()
    cuda.allow(4)
    waits.join(WAIT)
    (move,) = moving
    first = min(cuda.registered)
    assert move.address == first + 2 * PIECE + HEADER_BYTES
    assert move.cuts == (PIECE - HEADER_BYTES,)


def test_moves_do_without_when_it_takes_too_long(attached, monkeypatch) -> None:
    """The first has waited for all of them; where the registration will be is cut all the same."""
    monkeypatch.setattr(attachment_module, "PIN_PATIENCE", 0.02)
    cuda, wait_for, waited = FakeCuda(gated=True), PinnedRegion.wait_for, []

    def noting(region, address, nbytes, timeout):
        waited.append(timeout)
        return wait_for(region, address, nbytes, timeout)

    monkeypatch.setattr(PinnedRegion, "wait_for", noting)
    arena = attached(cuda)
    assert arena.move(0, ((1,),)).cuts == (PIECE - HEADER_BYTES,)
    assert arena.move(PIECE, ((1,),)).cuts == (PIECE - HEADER_BYTES,)
    assert waited == [0.02, 0.0]
    cuda.allow(4)


def test_fault_f04_an_arena_that_is_used_is_unpinned_when_the_last_copy_is_over(attached) -> None:
    """Registration fails while two transfers hold the arena: nothing is taken from under them."""
    cuda = FakeCuda(answers={2: NO_MEMORY}, gated=True)
    arena = attached(cuda)
    arena.hold()
    arena.hold()
    cuda.allow(4)
    assert arena.move(2 * PIECE, ((1,),)).cuts
    assert not gone(cuda)
    arena.release()
    assert len(cuda.registered) == 2
    arena.release()
    assert cuda.registered == {}
    order = cuda.addresses("register")
    assert cuda.addresses("unregister") == [order[1], order[0]]


def test_a_retired_arena_is_unpinned_and_then_unmapped(attached) -> None:
    cuda = FakeCuda()
    arena = attached(cuda)
    arena.hold()
    assert arena.move(0, ((1,),)).cuts
    arena.retire()
    assert cuda.registered
    arena.release()
    assert gone(cuda)
    arena.retire()
    assert len(cuda.addresses("unregister")) == len(cuda.addresses("register"))
