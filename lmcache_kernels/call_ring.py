"""Pinned host memory from which kernels read the ids of a copy.

A kernel reads the few words across the bus itself: an upload by the copy engine would cost the host
as much as a launch, and would queue behind whatever bulk copy that engine is at.
"""

from __future__ import annotations

import threading

import torch

WORDS = 1 << 14
"""Of a ring as it begins: room for hundreds of ordinary copies."""


class CallRing:
    """Words for the copies queued on one stream, used again when the kernels have read them.

    Hold ``lock`` from :meth:`take` until the launch that reads the words is queued. The ring has two halves. When a half is full, an event is queued behind its last reader, and the
    other half is free once its own event has passed; else, or where a copy has more words than half
    the ring, a larger ring takes over. So the hot path allocates nothing and waits for nothing.
    """

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self.lock = threading.Lock()
        self._stream = stream
        self._retired: list[tuple[torch.Tensor, torch.cuda.Event]] = []
        self._open(WORDS)

    def _open(self, words: int) -> None:
        self.tensor = torch.empty(words, dtype=torch.int32, pin_memory=self._stream is not None)
        self.view = self.tensor.numpy().data
        self.address = self.tensor.data_ptr()
        self._half = words // 2
        self._next = 0
        self._end = self._half
        self._read: torch.cuda.Event | None = None  # behind the readers of the half not in use

    def take(self, words: int) -> int:
        """Where the next ``words`` words may be written."""
        start = self._next
        if start + words > self._end:
            start = self._turn(words)
        # Whole groups of four words, so that a call begins on 16 bytes.
        self._next = start + (words + 3 & ~3)
        return start

    def _turn(self, words: int) -> int:
        if self._stream is None:  # what runs on the host has read its words when it returns
            if words > self._half:
                self._open(1 << (2 * words).bit_length())
            self._end = self._half
            return 0
        event = torch.cuda.Event()
        event.record(self._stream)
        if words > self._half or not (self._read is None or self._read.query()):
            self._retired = [old for old in self._retired if not old[1].query()]
            self._retired.append((self.tensor, event))
            self._open(max(len(self.view), 1 << (2 * words - 1).bit_length()))
            return 0
        self._read = event
        start = 0 if self._end > self._half else self._half
        self._end = start + self._half
        return start


_rings: dict[tuple[int, int], CallRing] = {}


def ring_of(device: int, stream: int) -> CallRing:
    """The ring of a CUDA stream, given by its handle; kept for good, as kernels may still read it.

    A stream that its owner destroys must have run dry of copies.
    """
    ring = _rings.get((device, stream))
    if ring is None:
        fresh = CallRing(torch.cuda.ExternalStream(stream, torch.device("cuda", device)))
        ring = _rings.setdefault((device, stream), fresh)
    return ring
