"""Pinned host memory through which kernels get the ids of a copy.

The programs of a small copy read their few words across the bus: an upload would cost the host as
much as a launch, and would queue behind whatever bulk copy the copy engine is at. For a large copy
that would be many reads, so its words are uploaded.
"""

from __future__ import annotations

import threading

import numpy as np
import torch

WORDS = 1 << 14
"""Of a ring as it begins: room for hundreds of ordinary copies."""


class CallRing:
    """Words for the copies queued on one stream, used again when the kernels have read them.

    Hold ``lock`` from :meth:`take` until the launch that reads the words is queued. The ring has
    two halves. When a half is full, an event is queued behind its last reader, and the other half
    is free once its own event has passed; else, or where a copy has more words than half the ring,
    a larger ring takes over. So the hot path allocates nothing and waits for nothing.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.lock = threading.Lock()
        self._stream = stream
        self._retired: list[tuple[torch.Tensor, torch.cuda.Event]] = []
        self._open(WORDS)

    def _open(self, words: int) -> None:
        self._pinned = torch.empty(words, dtype=torch.int32, pin_memory=True)
        self._uploaded = torch.empty(words, dtype=torch.int32, device=self._stream.device)
        self.view = self._pinned.numpy().view(np.uint32).data
        self.address = self._pinned.data_ptr()
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

    def upload(self, start: int, words: int) -> int:
        """Queue a copy of words to the device; returns where they are there."""
        there = self._uploaded[start : start + words]
        there.copy_(self._pinned[start : start + words], non_blocking=True)
        return there.data_ptr()

    def _turn(self, words: int) -> int:
        event = torch.cuda.Event()
        event.record(self._stream)
        if words > self._half or not (self._read is None or self._read.query()):
            self._retired = [old for old in self._retired if not old[1].query()]
            self._retired.append((self._pinned, event))
            self._uploaded.record_stream(self._stream)
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
