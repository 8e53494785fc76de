"""All tiers below one arena, as the service uses them."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from lmcache_kernels.errors import ConfigError

from .link import TierLink
from .loading import LOADER, TierLoads
from .policies import STORE_POLICIES
from .writing_back import WriteBack

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lmcache_kernels.transfer.memory.arena import Arena
    from lmcache_kernels.transfer.messages import Found
    from lmcache_kernels.transfer.serving.chunk_table import ChunkKey
    from lmcache_kernels.transfer.serving.inbox import Inbox
    from lmcache_kernels.transfer.serving.later import Later
    from lmcache_kernels.transfer.serving.store import ChunkStore
    from lmcache_kernels.transfer.tiering.tier import Tier

    from .loading import Asked

logger = logging.getLogger(__name__)

MOST_CLEARS = 64
"""That wait for a tier that is away; of more, everything is cleared there."""

MOST_SENT = 1 << 16
"""Names of chunks that are remembered as sent; of others a tier is asked again whether it has them."""


@dataclass(eq=False)
class _Level:
    """A tier, and what is still to be cleared there: nothing of that is read meanwhile."""

    link: TierLink
    clears: list[frozenset[bytes]] = field(default_factory=list)  # an empty one: of everything
    clearing: bool = False  # the first of them

    def readable(self, shard: bytes) -> bool:
        return not any(not shards or shard in shards for shards in self.clears)

    def mask(self, shards: frozenset[bytes]) -> None:
        """These are to be cleared, too; what has begun may miss the latest."""
        waiting = self.clears[self.clearing :]
        if shards not in waiting and frozenset() not in waiting:
            if not shards or len(waiting) >= MOST_CLEARS:
                del self.clears[self.clearing :]
                shards = frozenset()
            self.clears.append(shards)


class Tiers:
    """Everything here is for the service's thread.

    Args:
        tiers: in the order in which they are asked; closed with this.
        store, inbox: the service's.
        arena: where the store's slots are.
        chunk_bytes: of a shard, if somebody is registered for it.
        store_policy: one of :data:`~.policies.STORE_POLICIES`.

    Raises:
        ConfigError: another policy.
        TierUnavailable: a tier that cannot use the arena.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        store: ChunkStore,
        inbox: Inbox,
        arena: Arena,
        chunk_bytes: Callable[[bytes], int | None],
        store_policy: str = "all",
    ) -> None:
        if store_policy not in STORE_POLICIES:
            raise ConfigError(
                f"store policy of tiers: expected one of {', '.join(STORE_POLICIES)}, got "
                f"{store_policy!r}"
            )
        try:
            for tier in tiers:
                tier.attach(arena.view(0, arena.nbytes))
        except BaseException:
            for tier in tiers:
                tier.close()
            raise
        self._inbox = inbox
        self._levels = [
            _Level(TierLink(tier, name, inbox))
            for tier, name in zip(tiers, _told_apart([tier.name for tier in tiers]), strict=True)
        ]
        self._write_back = WriteBack(store, arena, [level.link for level in self._levels])
        self._loads = TierLoads(store, arena, inbox, self._levels, chunk_bytes, self._promote)
        self._policy = store_policy
        self._sent: dict[ChunkKey, None] = {}  # of those found, what went down not long ago

    # --- what the service tells -------------------------------------------------------------------

    def looked_up(self, asked: Asked, found: int, now: float, deadline: float) -> Found | Later:
        """The reply to a lookup of which the arena has ``found`` chunks; see :meth:`.TierLoads.begin`."""
        if self._policy == "found" and found:
            keys = [(shard, digest) for digest in asked.digests[:found] for shard in asked.shards]
            self._send([key for key in keys if key not in self._sent], now)
        return self._loads.begin(asked, found, now, deadline)

    def end_session(self, request: str) -> None:
        """Nobody waits for a lookup of this request any more."""
        self._loads.cancel(request)

    def published(self, owner: int, keys: list[ChunkKey], now: float) -> None:
        """The owner has stored these."""
        if self._policy == "all" and owner != LOADER:
            self._write_back.add(keys, now)

    def damaged(self, keys: Sequence[ChunkKey], now: float) -> None:
        """These did not hold what they should, and may have come from below."""
        for level in self._levels:
            level.link.remove(keys, now, lambda done, now: None)

    def clear(self, shards: Sequence[bytes], now: float) -> None:
        """Nothing that was stored for these shards, or for any if none is named, comes up again.

        It is masked at once, and forgotten below as soon as the tier can be used.
        """
        wanted = frozenset(shards)
        self._write_back.forget(wanted)
        self._loads.clear(shards)
        self._sent.clear()
        for level in self._levels:
            level.mask(wanted)
            self._go_on_clearing(level, now)

    # --- time -------------------------------------------------------------------------------------

    def due(self) -> float:
        """When :meth:`expire` has something to do."""
        return self._loads.due()

    def expire(self, now: float) -> None:
        """Answer lookups whose time is up."""
        self._loads.expire(now)

    def tick(self, now: float) -> None:
        """Go on with what a tier was away for; every second or so."""
        for level in self._levels:
            level.link.tick(now)
            self._go_on_clearing(level, now)
        self._write_back.go_on(now)

    @property
    def over(self) -> bool:
        """All that was stored has gone down and all that was cleared is forgotten, as far as can be."""
        cleared = all(not level.clears or level.link.away for level in self._levels)
        return cleared and self._write_back.over

    def stats(self) -> dict[str, dict[str, int | float]]:
        """Per tier what :meth:`.TierLink.stats` says, in the order in which they are asked."""
        return {level.link.name: level.link.stats() for level in self._levels}

    @property
    def loads(self) -> int:
        """Lookups that wait for tiers."""
        return len(self._loads)

    @property
    def waiting(self) -> int:
        """Chunks that wait to go down, once for each tier."""
        return self._write_back.waiting

    def close(self, timeout: float) -> None:
        """Wait for what is under way, so many seconds at most, and close the tiers."""
        if not self._inbox.work_until(
            lambda: all(level.link.idle for level in self._levels), timeout
        ):
            logger.warning("tiers are still busy after %g s", timeout)
        for level in self._levels:
            level.link.close()

    # --- inside -----------------------------------------------------------------------------------

    def _send(self, keys: list[ChunkKey], now: float) -> None:
        self._sent |= dict.fromkeys(keys)
        while len(self._sent) > MOST_SENT:
            del self._sent[next(iter(self._sent))]
        self._write_back.add(keys, now)

    def _promote(self, keys: list[ChunkKey], level: int, now: float) -> None:
        """What came from one tier is kept in those above it, too."""
        if level and keys and self._policy != "none":
            self._write_back.add(keys, now, levels=level)

    def _go_on_clearing(self, level: _Level, now: float) -> None:
        if level.clears and not level.clearing and level.link.may_try(now):
            level.clearing = True
            level.link.clear(sorted(level.clears[0]), now, partial(self._cleared, level))

    def _cleared(self, level: _Level, done: bool, now: float) -> None:
        level.clearing = False
        if done:
            level.clears.pop(0)
            self._go_on_clearing(level, now)


def _told_apart(names: Sequence[str]) -> list[str]:
    """Each name as it is where it is first, with a number behind it where it comes again."""
    seen: Counter[str] = Counter()
    unique = []
    for name in names:
        seen[name] += 1
        unique.append(name if seen[name] == 1 else f"{name}-{seen[name]}")
    return unique
