"""Memory through which kernels get the ids of a copy: pinned on the host, uploaded to the device."""

from __future__ import annotations

import threading

import torch

from .cuda_runtime import forget_error, new_stream, quick
from .errors import TransferFailed

WORD_BYTES = 4

WORDS = 1 << 14
"""Of a ring as it begins: room for hundreds of ordinary copies."""


class CallRing:
    """Words for the copies queued on one stream, used again when the kernels have read them.

    Hold ``lock`` from :meth:`take` until the launch that reads the words is queued. The ring has
    two halves. When a half is full, an event is queued behind its last reader, and the other half
    is free once its own event has passed. If it has not, or a copy has more words than half the
    ring, a ring of twice the size takes over. So in the long run a copy allocates nothing, and it
    never waits.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.lock = threading.Lock()
        self._stream = stream
        self._uploads = new_stream(stream.device)
        self._uploaded = torch.cuda.Event()
        self._uploaded.record(self._uploads)  # torch makes an event when it is first recorded
        self._retired: list[tuple[torch.Tensor, torch.Tensor, torch.cuda.Event]] = []
        self._open(WORDS)

    def _open(self, words: int) -> None:
        host = torch.empty(words, dtype=torch.int32, pin_memory=True)
        # From the pool of the stream that writes it: memory that the ring's own stream gave back may
        # still be in use there.
        with torch.cuda.stream(self._uploads):
            device = torch.empty(words, dtype=torch.int32, device=self._stream.device)
        # Both are there, so this ring is whole whatever happened before.
        self._host, self._device, self.view = host, device, host.numpy().data
        self._half = words // 2
        self._next = 0
        self._end = self._half
        self._read: torch.cuda.Event | None = None  # behind the readers of the half not in use

    def take(self, words: int) -> int:
        """Where in ``view`` the next ``words`` words may be written."""
        start = self._next
        if start + words > self._end:
            start = self._turn(words)
        self._next = start + words
        return start

    def upload(self, start: int, words: int) -> int:
        """Where these words are on the device for what is queued on the ring's stream from now on.

        They travel on a stream of their own, so that they are there when a busy device gets so far.
        """
        there = self._device.data_ptr() + WORD_BYTES * start
        here = self._host.data_ptr() + WORD_BYTES * start
        runtime, uploads, uploaded = quick(), self._uploads.cuda_stream, self._uploaded.cuda_event
        code = (
            runtime.queue_copy(there, here, WORD_BYTES * words, uploads)
            or runtime.record(uploaded, uploads)
            or runtime.wait(self._stream.cuda_stream, uploaded, 0)
        )
        if code:
            forget_error()
            raise TransferFailed(f"CUDA refused to upload the ids of a copy: error {code}")
        return there

    def _turn(self, words: int) -> int:
        event = torch.cuda.Event()
        event.record(self._stream)
        self._retired = [old for old in self._retired if not old[-1].query()]
        if words > self._half or not (self._read is None or self._read.query()):
            old = (self._host, self._device, event)
            self._open(max(2 * len(self.view), 1 << (2 * words - 1).bit_length()))
            self._retired.append(old)
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
