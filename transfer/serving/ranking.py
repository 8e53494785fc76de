"""Things by a rank that changes. Pure."""

from __future__ import annotations

import heapq
import itertools
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterator

K = TypeVar("K")
R = TypeVar("R", float, tuple[float, str])

FEW = 64
"""Entries that are not worth cleaning up."""


class Ranking(Generic[K, R]):
    """A dict from things to their ranks that knows the lowest; O(log n) amortised for each call."""

    def __init__(self) -> None:
        self._ranks: dict[K, tuple[R, int]] = {}
        # Entries of ranks that are no more stay until they come up, or are most of all there are.
        self._heap: list[tuple[R, int, K]] = []
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._ranks)

    def put(self, key: K, rank: R) -> None:
        """Add, or change the rank."""
        number = next(self._numbers)
        self._ranks[key] = rank, number
        heapq.heappush(self._heap, (rank, number, key))
        if len(self._heap) > 2 * len(self._ranks) + FEW:
            self._heap = [(rank, number, key) for key, (rank, number) in self._ranks.items()]
            heapq.heapify(self._heap)

    def discard(self, key: K) -> None:
        self._ranks.pop(key, None)

    def items(self) -> Iterator[tuple[K, R]]:
        """All of them with their ranks, in no order."""
        return ((key, rank) for key, (rank, _) in self._ranks.items())

    def lowest(self) -> tuple[K, R] | None:
        """The one of the lowest rank, of equals the one whose rank is the oldest; None if empty."""
        while self._heap:
            rank, number, key = self._heap[0]
            if self._ranks.get(key) == (rank, number):
                return key, rank
            heapq.heappop(self._heap)
        return None
