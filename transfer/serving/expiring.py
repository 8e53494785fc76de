"""Things that end by themselves a fixed time after they were last put. Pure: time is an argument."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Generic, TypeVar

from lmcache_kernels.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

K = TypeVar("K")
V = TypeVar("V")


class Expiring(Generic[K, V]):
    """A dict whose entries expire ``ttl`` seconds after they were put.

    The time to live is the same for all and ``now`` never goes back, so the order of insertion is
    the order of expiry and every operation is O(1).

    Args:
        ttl: seconds, > 0; may be infinite. Another one counts for what is there, too.
        what: names the setting in the error.

    Raises:
        ConfigError: a time to live that is not above 0.
    """

    def __init__(self, ttl: float, what: str) -> None:
        if not ttl > 0:
            raise ConfigError(f"{what}: expected > 0 seconds, got {ttl}")
        self.ttl = ttl
        # key -> (when it was put, value). A plain dict would step over its removed entries every time.
        self._entries: OrderedDict[K, tuple[float, V]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, key: K, value: V, now: float) -> None:
        """Add or replace; either way it now has its whole time to live."""
        self._entries[key] = (now, value)
        self._entries.move_to_end(key)

    def get(self, key: K) -> V | None:
        entry = self._entries.get(key)
        return None if entry is None else entry[1]

    def pop(self, key: K) -> V | None:
        entry = self._entries.pop(key, None)
        return None if entry is None else entry[1]

    def items(self) -> Iterator[tuple[K, V]]:
        return ((key, value) for key, (_, value) in self._entries.items())

    def ages(self, now: float) -> Iterator[tuple[K, V, float]]:
        """Each entry, and how many seconds ago it was put; the oldest first."""
        return ((key, value, now - put_at) for key, (put_at, value) in self._entries.items())

    def expire(self, now: float) -> list[tuple[K, V]]:
        """Remove and return what has reached its deadline."""
        ended: list[tuple[K, V]] = []
        while self._entries:
            key, (put_at, value) = next(iter(self._entries.items()))
            if put_at + self.ttl > now:
                break
            del self._entries[key]
            ended.append((key, value))
        return ended
