"""Places of exact size in one contiguous capacity: which bytes of an arena are taken. Pure."""

from __future__ import annotations

from bisect import bisect_left, insort

from lmcache_kernels.errors import ConfigError, LocalProtocolError

SLOT_ALIGN = 512
"""Bytes. Covers every access width and O_DIRECT's usual sector, and is the size of a slot header."""

PARTS = 251
"""A prime, so that slots of any usual size spread over all."""


class SlotAllocator:
    """Hands out byte ranges of a capacity: best fit, sizes rounded up to ``align`` and no further.

    Free ranges are found by either end, so that neighbours merge at once, and by exact size. Slots
    of one size cost O(1) each however the capacity is fragmented; the sorted list of *distinct*
    free sizes stays short because they add up to at most the capacity (about 1400 of them in the
    worst arrangement of a million equal slots).

    Args:
        capacity_bytes: rounded down to ``align``.
        align: bytes; every offset and size is a multiple of it.

    Raises:
        ConfigError: a capacity or alignment below 1.
    """

    def __init__(self, capacity_bytes: int, align: int = SLOT_ALIGN) -> None:
        if align < 1 or capacity_bytes < 1:
            raise ConfigError(
                f"slots: expected capacity and align >= 1, got {capacity_bytes} and {align}"
            )
        self._align = align
        self.capacity_bytes = capacity_bytes - capacity_bytes % align
        self.used_bytes = 0
        # start -> size, in many: a dict that grows is copied, and a large one takes 50 ms.
        self._used: list[dict[int, int]] = [{} for _ in range(PARTS)]
        self._free: dict[int, int] = {}  # start -> size
        self._free_by_end: dict[int, int] = {}  # end -> start
        self._free_by_size: dict[int, dict[int, None]] = {}  # size -> starts
        self._free_sizes: list[int] = []  # keys of _free_by_size, sorted
        if self.capacity_bytes:
            self._add_free(0, self.capacity_bytes)

    @property
    def free_bytes(self) -> int:
        return self.capacity_bytes - self.used_bytes

    @property
    def largest_free(self) -> int:
        """Size in bytes of the longest free range."""
        return self._free_sizes[-1] if self._free_sizes else 0

    def round_up(self, nbytes: int) -> int:
        """The bytes that a slot for ``nbytes`` takes."""
        return -(-nbytes // self._align) * self._align

    def allocate(self, nbytes: int) -> int | None:
        """The offset of ``nbytes`` (>= 1) free bytes, now taken; None when no free range is as long.

        Raises:
            LocalProtocolError: a size below 1.
        """
        if nbytes < 1:
            raise LocalProtocolError(f"slot size: expected >= 1 byte, got {nbytes}")
        size = self.round_up(nbytes)
        position = bisect_left(self._free_sizes, size)
        if position == len(self._free_sizes):
            return None
        found = self._free_sizes[position]
        # popitem: looking up the last key instead would step over all removed ones every time.
        start, _ = self._free_by_size[found].popitem()
        self._forget(start, found)
        if found > size:
            self._add_free(start + size, found - size)
        self._used[start // self._align % PARTS][start] = size
        self.used_bytes += size
        return start

    def free(self, offset: int) -> None:
        """Give back a slot; free neighbours become one range with it.

        Raises:
            LocalProtocolError: ``offset`` is not the start of a slot, maybe not any more.
        """
        size = self._used[offset // self._align % PARTS].pop(offset, None)
        if size is None:
            raise LocalProtocolError(
                f"free: expected the offset of a slot in use, got {offset} (freed twice?)"
            )
        self.used_bytes -= size
        start, end = offset, offset + size
        before = self._free_by_end.get(start)
        if before is not None:
            self._remove_free(before, start - before)
            start = before
        after = self._free.get(end)
        if after is not None:
            self._remove_free(end, after)
            end += after
        self._add_free(start, end - start)

    def _add_free(self, start: int, size: int) -> None:
        self._free[start] = size
        self._free_by_end[start + size] = start
        starts = self._free_by_size.get(size)
        if starts is None:
            starts = self._free_by_size[size] = {}
            insort(self._free_sizes, size)
        starts[start] = None

    def _remove_free(self, start: int, size: int) -> None:
        del self._free_by_size[size][start]
        self._forget(start, size)

    def _forget(self, start: int, size: int) -> None:
        """The rest of the removal of a range that its size's starts lack by now."""
        del self._free[start]
        del self._free_by_end[start + size]
        if not self._free_by_size[size]:
            del self._free_by_size[size]
            del self._free_sizes[bisect_left(self._free_sizes, size)]
