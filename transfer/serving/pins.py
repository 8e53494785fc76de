"""Chunks that somebody wants kept for a while, whoever uses them. Pure.

Pins may share chunks; a chunk is held, and counts against the limit, once. A pin says nothing of who
may find a chunk: what nobody can find any more, pins do not keep.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from lmcache_kernels.errors import CapacityError, ConfigError

from .ranking import Ranking

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from .chunk_table import Chunk, ChunkTable

PIN_LIMIT = 0.5
"""Of the capacity, what all pins together may hold: the other half goes on working as a cache."""

MAX_PINS = 1 << 12
"""More are refused: each keeps a list of its chunks, for days maybe."""


class PinState(NamedTuple):
    """What can be told of a pin: how many ``chunks`` it was made for, and for how long it goes on."""

    pin: str
    chunks: int
    seconds_left: float


class Pins:
    """What is pinned, each pin until a time of its own. O(1) for a chunk named, O(log n) for a pin.

    Args:
        table: where the chunks are.
        limit: part of its capacity that pins may hold.

    Raises:
        ConfigError: a limit that is not between 0 and 1.
    """

    def __init__(self, table: ChunkTable, limit: float = PIN_LIMIT) -> None:
        if not 0 <= limit <= 1:
            raise ConfigError(f"pin_limit: expected 0 <= pin_limit <= 1, got {limit}")
        self.nbytes = 0
        self._table = table
        self._most_bytes = limit * table.slots.capacity_bytes
        self._pins: dict[str, list[Chunk]] = {}
        self._ends: Ranking[str, float] = Ranking()
        self._held: dict[Chunk, int] = {}  # by how many pins

    def __len__(self) -> int:
        return len(self._pins)

    def put(self, pin: str, rows: Iterable[Sequence[Chunk]], end: float) -> int:
        """Hold the first rows, each as a whole, as many as there is room for; how many those are.

        Args:
            pin: replaces the one of the same name.
            rows: of resident chunks.
            end: when :meth:`expire` ends it.

        Raises:
            CapacityError: too many pins; what there was of this name is there still.
        """
        if pin not in self._pins and len(self._pins) >= MAX_PINS:
            raise CapacityError(f"pins: expected at most {MAX_PINS}, and this is one more")
        self.end(pin)
        pinned: list[Chunk] = []
        new: list[Chunk] = []
        count = 0
        for row in rows:
            added = [chunk for chunk in row if chunk not in self._held]
            nbytes = sum(chunk.slot_bytes for chunk in added)
            if self.nbytes + nbytes > self._most_bytes:
                break
            self.nbytes += nbytes
            for chunk in row:
                self._held[chunk] = self._held.get(chunk, 0) + 1
            pinned += row
            new += added
            count += 1
        self._table.hold(new)
        if pinned:
            self._pins[pin] = pinned
            self._ends.put(pin, end)
        return count

    def states(self, now: float) -> list[PinState]:
        """Of all pins, by name."""
        return sorted(
            PinState(pin, len(self._pins[pin]), end - now) for pin, end in self._ends.items()
        )

    def end(self, pin: str) -> None:
        """Let go of what only this pin holds; unknown names are fine."""
        free = []
        for chunk in self._pins.pop(pin, ()):
            pins = self._held.get(chunk, 0)
            if pins > 1:
                self._held[chunk] = pins - 1
            elif pins:
                free.append(chunk)
                self._forget(chunk)
        self._ends.discard(pin)
        self._table.release(free)

    def expire(self, now: float) -> None:
        """End those whose time is up."""
        while (first := self._ends.lowest()) is not None and first[1] <= now:
            self.end(first[0])

    def let_go_of_unlisted(self, among: Iterable[Chunk] | None = None) -> None:
        """Hold no longer what nobody can find any more, of these chunks or of all."""
        for chunk in list(self._held) if among is None else among:
            if chunk in self._held and not chunk.listed:
                self._forget(chunk)
                self._table.release([chunk])

    def _forget(self, chunk: Chunk) -> None:
        del self._held[chunk]
        self.nbytes -= chunk.slot_bytes
