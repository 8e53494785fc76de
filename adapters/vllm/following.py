"""The stores of a step that go along with it, layer by layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lmcache_kernels.transfer.engine_driven.layered_store import LayeredStore


class FollowingStore:
    """Tells a store how far the step is.

    Args:
        places: of every layer by name: when the store expects it.
    """

    def __init__(self, store: LayeredStore, places: Mapping[str, int]) -> None:
        self._store = store
        self._places = places
        self._computed: set[int] = set()
        self._through = -1

    def computed(self, name: str) -> None:
        """What the engine has queued writes all of this layer."""
        # A model may run its layers in another order than that of their names, and it may never tell
        # of some: only what comes behind no gap is known to be there.
        self._computed.add(self._places.get(name, -1))
        through = self._through
        while through + 1 in self._computed:
            through += 1
        if through > self._through:
            self._through = through
            self._store.saved(through)

    def drop(self) -> None:
        """What the engine was to write it will not write."""
        self._store.stop()

    def all_computed(self) -> None:
        """What the engine has queued is the whole step."""
        self._store.saved(len(self._places) - 1)
