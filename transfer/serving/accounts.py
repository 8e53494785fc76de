"""Whose bytes the chunks are, and whose idle ones go when room is needed. Pure.

Idle chunks of each tenant with a quota wait in a pool of their own, those of all others in a common
one. Each pool has its own policy, so a tenant that is at its quota pushes out its own chunks only, and
what one tenant floods the cache with does not age what others have.
"""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from .ranking import Ranking

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from .chunk_table import Chunk
    from .eviction import EvictionPolicy
    from .quotas import Quotas


class QuotaUse(NamedTuple):
    """Of one tenant: the bytes of slots that it may use, and those that it does."""

    quota_bytes: int
    used_bytes: int


@dataclass(slots=True, eq=False)
class Pool:
    """Idle chunks; ``name``: of the tenant whose they are, "" for the common pool."""

    name: str
    policy: EvictionPolicy


@dataclass(slots=True, eq=False)
class Account:
    """One tenant, for as long as it uses anything.

    Attributes:
        quota: bytes, None for no limit; with one ``pool`` is its own.
        used_bytes: slots of its chunks, whatever their state.
    """

    tenant: str
    quota: int | None
    pool: Pool
    used_bytes: int = 0

    @property
    def room(self) -> float:
        """Bytes that it may use yet; below 0 after its quota was lowered."""
        return math.inf if self.quota is None else self.quota - self.used_bytes


class Accounts:
    """The tenants that use anything, and all idle chunks.

    Calls cost O(1) amortised for each chunk named and O(log n) for each pool; only a change of quotas
    looks at more, which its method names.

    Args:
        policy: makes one for each pool.
        quotas: to begin with.
    """

    def __init__(self, policy: Callable[[], EvictionPolicy], quotas: Quotas) -> None:
        self.quotas = quotas
        self.idle = self.idle_bytes = 0
        self._make_policy = policy
        self._common = Pool("", policy())
        self._accounts: dict[str, Account] = {}
        self._limited = 0  # accounts with a pool of their own
        self._over: OrderedDict[Account, None] = OrderedDict()  # maybe above their quota
        # Pools by idle bytes; those that have changed since they were ranked.
        self._ranking: Ranking[Pool, tuple[float, str]] = Ranking()
        self._changed: set[Pool] = set()

    # --- tenants ----------------------------------------------------------------------------------

    def of(self, tenant: str) -> Account:
        """The tenant's account; a new one is forgotten unless something is charged to it."""
        account = self._accounts.get(tenant)
        if account is None:
            quota = self.quotas.of(tenant)
            account = Account(tenant, quota, self._common)
            if quota is not None:
                account.pool = Pool(tenant, self._make_policy())
        return account

    def charge(self, account: Account, nbytes: int) -> None:
        """A slot of ``nbytes`` is the account's from now on."""
        if not account.used_bytes:
            self._accounts[account.tenant] = account
            self._limited += account.quota is not None
        account.used_bytes += nbytes

    def credit(self, account: Account, nbytes: int) -> None:
        """A slot of ``nbytes`` is not the account's any more."""
        account.used_bytes -= nbytes
        if not account.used_bytes:
            del self._accounts[account.tenant]
            if account.quota is not None:
                self._drop(account.pool)

    def set_quota(self, tenant: str | None, nbytes: int | None) -> None:
        """Another quota for ``tenant``, or another default if None.

        Looks at every account for the default, and at every idle chunk of the common pool when tenants
        come from there or go there.

        Raises:
            ConfigError: no tenant's name, or a quota below 0; nothing has changed.
        """
        quotas = self.quotas.changed(tenant, nbytes)
        if tenant is None:
            self.change(quotas)
        else:
            self.quotas = quotas
            self._apply([self._accounts[tenant]] if tenant in self._accounts else [])

    def change(self, quotas: Quotas) -> None:
        """These in place of those so far. Costs what a change of the default does."""
        self.quotas = quotas
        self._apply(list(self._accounts.values()))

    def _apply(self, accounts: Sequence[Account]) -> None:
        """The quotas as they are now to these."""
        moving = []
        for account in accounts:
            before, account.quota = account.quota, self.quotas.of(account.tenant)
            if (before is None) != (account.quota is None):
                moving.append(account)
            if account.room < 0:
                self._over[account] = None
        if moving:
            self._move(moving)

    def uses(self) -> dict[str, QuotaUse]:
        """Of every tenant that has a quota of its own, or uses anything and has one."""
        found = {name: QuotaUse(quota, 0) for name, quota in self.quotas.tenants.items()}
        for name, account in self._accounts.items():
            if account.quota is not None:
                found[name] = QuotaUse(account.quota, account.used_bytes)
        return found

    def above_quota(self, most: int) -> list[Account]:
        """Some that may use more than they may, as quotas were lowered; :meth:`looked_at` of each."""
        return list(itertools.islice(self._over, most))

    def looked_at(self, account: Account) -> None:
        """Its turn comes again, behind the others, if it is above its quota still."""
        del self._over[account]
        if account.room < 0:
            self._over[account] = None

    # --- idle chunks ------------------------------------------------------------------------------

    def add_idle(self, chunks: Sequence[Chunk]) -> None:
        """These are idle from now on; the last of them shall go first."""
        for pool, some in self._by_pool(chunks):
            before = pool.policy.nbytes
            pool.policy.add(some)
            self._note(pool, len(some), pool.policy.nbytes - before)

    def remove_idle(self, chunks: Sequence[Chunk]) -> None:
        """These are not idle any more."""
        for pool, some in self._by_pool(chunks):
            before = pool.policy.nbytes
            pool.policy.remove(some)
            self._note(pool, -len(some), pool.policy.nbytes - before)

    def victim(self, pool: Pool) -> Chunk | None:
        """The next of the pool to go, which is no longer idle then; None if there is none."""
        chunk = pool.policy.victim()
        if chunk is not None:
            self._note(pool, -1, -chunk.slot_bytes)
        return chunk

    def fullest(self) -> Pool:
        """The pool of the most idle bytes: the common one before others, then by name."""
        if not self._limited:
            return self._common
        for pool in self._changed:
            self._ranking.put(pool, (-pool.policy.nbytes, pool.name))
        self._changed.clear()
        first = self._ranking.lowest()
        return self._common if first is None else first[0]

    def _note(self, pool: Pool, chunks: int, nbytes: int) -> None:
        self.idle += chunks
        self.idle_bytes += nbytes
        self._changed.add(pool)

    def _by_pool(self, chunks: Sequence[Chunk]) -> Iterable[tuple[Pool, Sequence[Chunk]]]:
        if not chunks:
            return ()
        if not self._limited:
            return ((self._common, chunks),)
        pools = {account.pool for account in {chunk.account for chunk in chunks}}
        if len(pools) == 1:  # nearly always: a prefix has one tenant
            return ((pools.pop(), chunks),)
        found: dict[Pool, list[Chunk]] = {}
        for chunk in chunks:
            found.setdefault(chunk.account.pool, []).append(chunk)
        return found.items()

    def _move(self, accounts: Sequence[Account]) -> None:
        """Their idle chunks into the pools that they belong to by their quotas now."""
        leaving = {account for account in accounts if account.pool is self._common}
        idle = [chunk for chunk in self._common.policy if chunk.account in leaving]
        for account in accounts:
            if account.pool is not self._common:
                idle += account.pool.policy
        self.remove_idle(idle)
        for account in accounts:
            if account.quota is None:
                self._drop(account.pool)
                account.pool = self._common
            else:
                self._limited += 1
                account.pool = Pool(account.tenant, self._make_policy())
        self.add_idle(idle[::-1])

    def _drop(self, pool: Pool) -> None:
        self._limited -= 1
        self._ranking.discard(pool)
        self._changed.discard(pool)
