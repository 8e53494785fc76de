"""The ring through which ids reach a GPU, with a device that runs when the test says so."""

from __future__ import annotations

import ctypes
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from lmcache_kernels import call_ring
from lmcache_kernels.call_ring import WORDS, CallRing
from lmcache_kernels.errors import TransferFailed


class Device:
    """A stream of work that stands still until :meth:`run`; allocations can be made to fail."""

    def __init__(self):
        self.queued = self.over = 0
        self.memory_left = True
        self.runtime = Runtime()

    def run(self, upto=None):
        self.over = self.queued if upto is None else upto

    def empty(self, words, *, dtype, pin_memory=False, device=None):
        if device is not None and not self.memory_left:
            raise torch.OutOfMemoryError("no memory")
        return torch.full((words,), -777, dtype=dtype)


class Runtime:
    """CUDA's calls: copies happen at once, or are refused."""

    refused = 0

    def queue_copy(self, to, origin, nbytes, stream):
        if not self.refused:
            ctypes.memmove(to, origin, nbytes)
        return self.refused

    def record(self, event, stream):
        return 0

    def wait(self, stream, event, flags):
        return 0


class Event:
    cuda_event = 0

    def __init__(self, device):
        self.device, self.at = device, 0

    def record(self, stream):
        self.device.queued += 1
        self.at = self.device.queued

    def query(self):
        return self.device.over >= self.at


@pytest.fixture
def device(monkeypatch):
    device = Device()

    @contextmanager
    def stream(_):
        yield

    uploads = SimpleNamespace(cuda_stream=1)
    cuda = SimpleNamespace(Event=lambda: Event(device), stream=stream)
    monkeypatch.setattr(call_ring, "quick", lambda: device.runtime)
    monkeypatch.setattr(call_ring, "new_stream", lambda _: uploads)
    monkeypatch.setattr(call_ring, "forget_error", lambda: None)
    monkeypatch.setattr(
        call_ring, "torch", SimpleNamespace(cuda=cuda, empty=device.empty, int32=torch.int32)
    )
    return device


@pytest.fixture
def ring(device):
    return CallRing(SimpleNamespace(device="cuda:0", cuda_stream=2))


def put(ring, words):
    """Send words through the ring; what arrives on the device, to be read whenever."""
    at = ring.take(len(words))
    ring.view[at : at + len(words)] = torch.tensor(words, dtype=torch.int32).numpy().data
    ring.upload(at, len(words))
    return ring._device[at : at + len(words)]


def test_words_arrive_and_stay_until_their_readers_are_over(device, ring):
    """The device is never more than half a ring behind: nothing is allocated, nothing overwritten."""
    per_half = WORDS // 2 // 100
    memory = ring.view
    pending = []
    for turn in range(5 * per_half):
        pending.append((turn, put(ring, [turn] * 100)))
        if len(pending) > per_half - 1:
            number, words = pending.pop(0)
            assert (words == number).all()
            device.run()
    assert all((words == number).all() for number, words in pending)
    assert ring.view is memory


def test_a_device_that_is_behind_gets_a_larger_ring_and_loses_no_word(device, ring):
    pending = [(turn, put(ring, [turn] * 100)) for turn in range(WORDS // 10)]
    assert len(ring.view) >= 4 * WORDS
    assert all((words == number).all() for number, words in pending)
    assert ring._retired
    device.run()
    for turn in range(len(ring.view) // 100):
        put(ring, [turn] * 100)
        device.run()
    assert not ring._retired


@pytest.mark.parametrize("words", [WORDS // 2, WORDS // 2 + 1, WORDS, 5 * WORDS])
def test_a_copy_of_many_words_fits(device, ring, words):
    small = put(ring, [7, 8, 9])
    large = put(ring, list(range(words)))
    assert large.tolist() == list(range(words))
    assert small.tolist() == [7, 8, 9]


def test_after_a_failed_allocation_the_ring_works_as_before(device, ring):
    first = put(ring, [1, 2, 3])
    device.memory_left = False
    with pytest.raises(torch.OutOfMemoryError):
        ring.take(WORDS)
    assert put(ring, [4, 5, 6]).tolist() == [4, 5, 6]
    assert first.tolist() == [1, 2, 3]
    device.memory_left = True
    assert put(ring, [5] * WORDS).tolist() == [5] * WORDS


def test_a_refused_upload_is_an_error(device, ring):
    device.runtime.refused = 700
    with pytest.raises(TransferFailed, match="700"):
        put(ring, [1])
    device.runtime.refused = 0
    assert put(ring, [4, 5, 6]).tolist() == [4, 5, 6]
