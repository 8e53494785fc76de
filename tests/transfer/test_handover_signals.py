"""Signals between processes, and the memory of another GPU, without a GPU: what is asked of CUDA."""

from __future__ import annotations

import pytest
import torch
from handover_peer import HandoverPeer

from lmcache_kernels.errors import (
    ConfigError,
    PeerGone,
    RemoteProtocolError,
    TransferFailed,
    TransferTimeout,
)
from lmcache_kernels.transfer.handover import peer_memory, peer_signals
from lmcache_kernels.transfer.handover.peer_memory import bytes_at, open_for
from lmcache_kernels.transfer.handover.peer_signals import (
    EVENTS_KEPT,
    PeerSignals,
    wait_for,
    wait_until,
)
from lmcache_kernels.transfer.sharing.cuda_driver import CudaCallFailed, CudaDriver
from lmcache_kernels.transfer.sharing.cuda_share import CudaSharing
from lmcache_kernels.transfer.sharing.descriptors import CudaShare, describe

HND = [{"layout": "kv_first_hnd", "seed": 1}]
OWN, OTHER = ("00000000-0000-0000-0000-00000000000" + digit for digit in "12")
MIB = 1 << 20


class Event:
    def __init__(self, *states):
        self._states = list(states)

    def ipc_handle(self):
        return bytes(64)

    def query(self):
        state = self._states.pop(0)
        if isinstance(state, Exception):
            raise state
        return state


@pytest.fixture
def signals():
    made = PeerSignals()
    yield made
    made.close()


def test_waiting_ends_when_the_work_is_done(signals):
    states = iter([False] * 5 + [True])
    wait_until(lambda: next(states), signals.name.decode(), 30)


def test_what_was_done_before_its_process_ended_counts_as_done(signals):
    signals.close()
    wait_until(lambda: True, signals.name.decode(), 30)


def test_waiting_ends_when_the_other_process_is_killed():
    """It dies after the wait has begun, so its work never gets done."""
    with HandoverPeer() as other:
        name = other.offer(HND)[:48].decode()
        looks = []

        def done():
            looks.append(1)
            if len(looks) == 2:
                other.kill()
            return False

        with pytest.raises(PeerGone, match="its process has ended"):
            wait_until(done, name, 30)
    assert len(looks) > 2, "the first look found it alive"


def test_waiting_for_a_process_that_lives_ends_in_time(signals):
    with pytest.raises(TransferTimeout, match=r"not done within 0.01 s"):
        wait_until(lambda: False, signals.name.decode(), 0.01)


def test_a_signal_is_waited_for_by_its_event(signals, monkeypatch):
    imported = []

    def import_event(handle, device):
        imported.append((handle, device))
        return Event(False, False, True)

    monkeypatch.setattr(peer_signals, "import_event", import_event)
    signal = signals.signal(Event())
    assert len(signal) == 48 + 64
    wait_for(signal, "cuda:1", 30)
    assert imported == [(bytes(64), "cuda:1")]


def test_an_error_of_cuda_ends_the_wait(signals, monkeypatch):
    failing = Event(False, RuntimeError("an illegal memory access was encountered"))
    monkeypatch.setattr(peer_signals, "import_event", lambda handle, device: failing)
    with pytest.raises(TransferFailed, match="an illegal memory access"):
        wait_for(signals.signal(Event()), "cuda:0", 30)


def test_on_a_gpu_a_signal_without_an_event_is_refused(signals):
    with pytest.raises(RemoteProtocolError, match="expected 64 bytes, got 0"):
        wait_for(signals.signal(None), "cuda:0", 30)


def test_events_that_nobody_waits_for_are_bounded(signals):
    class Numbered(Event):
        def __init__(self, number):
            self._number = number

        def ipc_handle(self):
            return self._number.to_bytes(64, "big")

    for number in range(3 * EVENTS_KEPT):
        signals.signal(Numbered(number))
    assert len(signals._events) == EVENTS_KEPT


# --- memory of other GPUs -------------------------------------------------------------------------


class FakeDriver:
    """Sees one GPU only; opens whatever it is told on it, in host memory that stands in for it."""

    def __init__(self):
        self.memory = torch.zeros(2 * MIB, dtype=torch.uint8)
        self.asked = []

    def ordinals(self):
        return {OWN: 0}

    def open(self, ordinal, handle):
        self.asked.append(("open", ordinal, handle[0]))
        if handle[0] == 0xEE:
            raise CudaCallFailed("cuIpcOpenMemHandle_v2: CUDA_ERROR_INVALID_VALUE (1)")
        return self.memory.data_ptr()

    def close(self, ordinal, address):
        self.asked.append(("close", ordinal))

    def allocation(self, ordinal, address):
        return address, 2 * MIB

    def bytes_at(self, ordinal, address, nbytes):
        return bytes_at(address, nbytes, torch.device("cpu"))


@pytest.fixture
def driver(monkeypatch):
    made = FakeDriver()
    sharing = CudaSharing(made)
    monkeypatch.setattr(peer_memory, "_driver", lambda: made)
    monkeypatch.setattr(peer_memory, "_sharing", lambda: sharing)
    return made


def descriptor(first_byte, offset=4096):
    share = CudaShare(handle=bytes([first_byte] * 64), device=OTHER, nbytes=2 * MIB, offset=offset)
    return describe(torch.empty(4, 6, dtype=torch.float16), share)


def test_memory_of_a_gpu_that_is_not_seen_is_opened_by_the_one_that_copies(driver):
    opened = open_for([descriptor(1), descriptor(1, offset=8192), descriptor(2)], "cuda:0")
    assert driver.asked == [("open", 0, 1), ("open", 0, 2)]
    first, second, _ = opened.tensors
    assert first.data_ptr() == driver.memory.data_ptr() + 4096
    assert second.data_ptr() == driver.memory.data_ptr() + 8192
    assert (first.shape, first.dtype) == ((4, 6), torch.float16)
    opened.close()
    opened.close()
    assert driver.asked[2:] == [("close", 0), ("close", 0)]


def test_all_of_a_cache_is_opened_or_nothing(driver):
    with pytest.raises(PeerGone, match="CUDA_ERROR_INVALID_VALUE"):
        open_for([descriptor(1), descriptor(0xEE)], "cuda:0")
    assert driver.asked == [("open", 0, 1), ("open", 0, 0xEE), ("close", 0)]


def test_a_gpu_that_cannot_reach_the_other_says_so(monkeypatch):
    def refuse(driver, ordinal, handle):
        raise CudaCallFailed("cuIpcOpenMemHandle_v2: CUDA_ERROR_PEER_ACCESS_UNSUPPORTED (217)")

    monkeypatch.setattr(CudaDriver, "open", refuse)
    driver = object.__new__(peer_memory._PeerDriver)
    with pytest.raises(ConfigError, match="cuda:3 cannot reach the GPU that it lies on"):
        driver.open(3, bytes(64))
