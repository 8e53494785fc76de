"""Pinned host buffers from which kernels read the ids of one copy.

A kernel reads the few words across the bus itself: an upload by the copy engine would cost the host
as much as a launch, and would queue behind whatever bulk copy that engine is at. A buffer is used
again when the event behind its last launch has passed, so the hot path allocates nothing.
"""

from __future__ import annotations

from collections import deque
from functools import cache

import torch

SMALLEST_WORDS = 1024


class CallBuffer:
    """``words`` 32-bit words. ``tensor`` int32, ``view`` the same memory for the host to write."""

    def __init__(self, words: int, device: str) -> None:
        on_gpu = device != "cpu"
        self.tensor = torch.empty(words, dtype=torch.int32, pin_memory=on_gpu)
        self.view = self.tensor.numpy().data
        self.address = self.tensor.data_ptr()
        self.last_use = torch.cuda.Event() if on_gpu else None


class CallBuffers:
    """The buffers of one device. Safe for threads."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._index = torch.device(device).index
        self._streams: dict[int, torch.cuda.Stream] = {}  # torch's own lookup costs 2 us
        # Per size. Not bounded here: every buffer in use stands for a launch that is queued, and
        # the driver bounds those. Appending and popping are atomic.
        self._free: dict[int, deque[CallBuffer]] = {}

    def take(self, words: int) -> CallBuffer:
        """A buffer of at least ``words`` words; give it back by :meth:`put`."""
        size = SMALLEST_WORDS if words <= SMALLEST_WORDS else 1 << (words - 1).bit_length()
        free = self._free.get(size)
        if free is None:
            free = self._free.setdefault(size, deque())
        try:
            buffer = free.popleft()
        except IndexError:
            return CallBuffer(size, self._device)
        if buffer.last_use is not None and not buffer.last_use.query():
            free.appendleft(buffer)
            return CallBuffer(size, self._device)
        return buffer

    def put(self, buffer: CallBuffer) -> None:
        """The launch that reads the buffer is queued on the current stream."""
        if buffer.last_use is not None:
            raw = torch._C._cuda_getCurrentRawStream(self._index)
            stream = self._streams.get(raw)
            if stream is None:
                stream = torch.cuda.ExternalStream(raw, self._device)
                self._streams[raw] = stream
            buffer.last_use.record(stream)
        self._free[len(buffer.view)].append(buffer)


@cache
def call_buffers(device: str) -> CallBuffers:
    """The buffers that all copies run on a device share."""
    return CallBuffers(device)
