"""What a chunk store counts, so that what it says of itself is true. Pure.

A store counts when its chunks can be found, a load when its reader says that it has read them: what was
only begun is counted nowhere, and what went wrong has a counter of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from collections.abc import Set as AbstractSet

    from .chunk_table import Chunk


@dataclass(slots=True)
class Counters:
    """What happened since the start. Bytes are those that slots were asked for, without rounding.

    Attributes:
        lookups: that were answered: ``lookups_full``, ``lookups_partial`` and ``lookups_empty`` of them
            found all that they named, a part of it, or named nothing; the others found nothing.
        asked, hit: chunks that lookups named, and found in the arena.
        stores: those that made chunks visible: so many ``stored`` of ``stored_bytes``.
        stores_aborted, stores_expired, stores_dropped, stores_cleared: those that made none visible,
            because their writer gave up, took too long or was lost, or what it wrote was cleared.
        stores_no_room: reservations that got fewer slots than they needed.
        loads: those that were read whole. Chunks ``loaded`` and ``loaded_bytes`` are those of all loads.
        loads_missing: loads that found fewer chunks than they named.
        loads_damaged, loads_failed, loads_expired, loads_dropped: those whose reader found a chunk
            damaged, could not read, took too long or was lost.
        cleared, discarded, damaged: chunks.
    """

    lookups: int = 0
    lookups_full: int = 0
    lookups_partial: int = 0
    lookups_empty: int = 0
    asked: int = 0
    hit: int = 0
    stores: int = 0
    stored: int = 0
    stored_bytes: int = 0
    stores_aborted: int = 0
    stores_expired: int = 0
    stores_dropped: int = 0
    stores_cleared: int = 0
    stores_no_room: int = 0
    loads: int = 0
    loaded: int = 0
    loaded_bytes: int = 0
    loads_missing: int = 0
    loads_damaged: int = 0
    loads_failed: int = 0
    loads_expired: int = 0
    loads_dropped: int = 0
    cleared: int = 0
    discarded: int = 0
    damaged: int = 0

    def answered(self, asked: int, found: int) -> None:
        """A lookup named so many chunks, and its caller was told that so many are there."""
        self.lookups += 1
        if not asked:
            self.lookups_empty += 1
        elif found == asked:
            self.lookups_full += 1
        elif found:
            self.lookups_partial += 1

    def committed(self, written: Sequence[Chunk]) -> None:
        """A store is over; those of its chunks that are listed can be found."""
        visible = [chunk.nbytes for chunk in written if chunk.listed]
        self.stored += len(visible)
        self.stored_bytes += sum(visible)
        self.discarded += len(written) - len(visible)
        if visible:
            self.stores += 1
        else:
            self.stores_cleared += 1

    def read(self, chunks: Sequence[Chunk], damaged: AbstractSet[int], *, failed: bool) -> None:
        """A load is over: it ended before the first that was damaged, or has ``failed``."""
        good = chunks[: min(damaged)] if damaged else chunks
        if failed:
            self.loads_failed += 1
            return
        self.loaded += len(good)
        self.loaded_bytes += sum([chunk.nbytes for chunk in good])
        if damaged:
            self.loads_damaged += 1
        else:
            self.loads += 1
