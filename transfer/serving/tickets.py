"""Slots that somebody may write or read, under a number that only its owner can use. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .expiring import Expiring

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from .chunk_table import Chunk

WRITE_TTL = 600.0
"""Seconds a writer has between reserve and commit: ten times what a worker waits for its device."""

READ_TTL = 180.0
"""Seconds a reader has until it says that it is done: three times what a worker waits for its
device."""

NO_TICKET = 0
"""The ticket of a reservation or read without chunks; there is nothing to commit."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """Chunk ``indices[i]`` of the call goes into the slot at ``offsets[i]``."""

    ticket: int
    indices: list[int]
    offsets: list[int]


@dataclass(frozen=True, slots=True)
class Reading:
    """Where the first chunks of the call lie."""

    ticket: int
    offsets: list[int]


class Tickets:
    """The chunks of each; a ticket expires ``ttl`` seconds after it was given.

    Args:
        numbers: of new tickets, none of them :data:`NO_TICKET`.
        ttl: seconds, > 0; may be infinite.
        what: names the setting in the error.

    Raises:
        ConfigError: a time to live that is not above 0.
    """

    def __init__(self, numbers: Iterator[int], ttl: float, what: str) -> None:
        self._numbers = numbers
        self._tickets: Expiring[int, tuple[int, list[Chunk]]] = Expiring(ttl, what)

    def __len__(self) -> int:
        return len(self._tickets)

    def chunks(self) -> Iterator[Chunk]:
        """Of all tickets."""
        return (chunk for _, (_, chunks) in self._tickets.items() for chunk in chunks)

    def give(self, owner: int, chunks: list[Chunk], now: float) -> int:
        """A ticket for these; none if there are none."""
        if not chunks:
            return NO_TICKET
        ticket = next(self._numbers)
        self._tickets.put(ticket, (owner, chunks), now)
        return ticket

    def get(self, owner: int, ticket: int) -> list[Chunk] | None:
        """The ticket's chunks; None if ``owner`` has no such ticket."""
        owned = self._tickets.get(ticket)
        return owned[1] if owned is not None and owned[0] == owner else None

    def take(self, owner: int, ticket: int) -> list[Chunk] | None:
        """:meth:`get`, and the ticket is gone."""
        chunks = self.get(owner, ticket)
        if chunks is not None:
            self._tickets.pop(ticket)
        return chunks

    def take_all(self, owner: int) -> Iterable[list[Chunk]]:
        """Those of every ticket of ``owner``, which are gone then. Looks at all tickets there are."""
        owned = [ticket for ticket, (other, _) in self._tickets.items() if other == owner]
        return [chunks for ticket in owned if (chunks := self.take(owner, ticket)) is not None]

    def expire(self, now: float) -> Iterable[tuple[int, list[Chunk]]]:
        """Owner and chunks of every ticket whose time is up, which is gone then."""
        return [owned for _, owned in self._tickets.expire(now)]
