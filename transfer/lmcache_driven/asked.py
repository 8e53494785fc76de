"""One transfer that a server is asked to make, as the worker knows it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from lmcache_kernels.errors import Closed
from lmcache_kernels.ids import pack_ids
from lmcache_kernels.transfer.engine_driven.worker import pack_digests
from lmcache_kernels.transfer.messages import LoadBlocks, StoreBlocks
from lmcache_kernels.transfer.observer import TransferEvent
from lmcache_kernels.transfer.pacing import paced
from lmcache_kernels.transfer.store_transfer import StoreTransfer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lmcache_kernels.ids import IdBuffer
    from lmcache_kernels.plane import CacheGroup
    from lmcache_kernels.transfer.observer import Direction, Outcome
    from lmcache_kernels.transfer.store_transfer import Transfer


@dataclass(eq=False)
class Asked:
    """See the module.

    Attributes:
        number: its id in messages.
        transfer: what the engine has of it.
        digests, block_ids: nobody else's to change.
        event: handle of the event it waits for.
        deadline: monotonic seconds; nobody waits for it any longer.
        tenant: for whom a store is.
        sent: when the server was asked; None: not yet.
        incarnation: of that server.
        over: its result is there, or about to be.
    """

    number: int
    transfer: Transfer
    digests: list[bytes]
    block_ids: list[Any]
    skip_tokens: int
    event: bytes
    deadline: float
    tenant: str = ""
    submitted: float = field(default_factory=time.monotonic)
    sent: float | None = None
    incarnation: str = ""
    over: bool = False

    @property
    def direction(self) -> Direction:
        return "store" if isinstance(self.transfer, StoreTransfer) else "load"

    def message(self, instance: int, groups: Sequence[CacheGroup]) -> StoreBlocks | LoadBlocks:
        """What to ask the server.

        Raises:
            LayoutError: block ids that cannot be right, or a chunk named twice.
            LocalProtocolError: something that is no digest.
        """
        storing = self.direction == "store"
        lists = enumerate(zip(self.block_ids, groups, strict=True))
        fields: dict[str, Any] = {
            "instance": instance,
            "transfer": self.number,
            "blocks": [
                _little_endian(pack_ids(ids, group.num_blocks, f"block_ids[{index}]", not storing))
                for index, (ids, group) in paced(lists)
            ],
            "digests": pack_digests(self.digests),
            "event": self.event,
        }
        if storing:
            return StoreBlocks(**fields, tenant=self.tenant)
        return LoadBlocks(**fields, skip_tokens=self.skip_tokens)

    def observed(self, end: int | BaseException, chunk_bytes: int) -> TransferEvent:
        """What became of it: so many chunks of that size, or an error."""
        now = time.monotonic()
        sent = now if self.sent is None else self.sent
        chunks = end if isinstance(end, int) else 0
        outcome: Outcome = "stored" if self.direction == "store" else "loaded"
        note = "copied by the server"
        if isinstance(end, BaseException):
            outcome = "stopped" if isinstance(end, Closed) else "failed"
            note = f"{type(end).__name__}: {end}"
        return TransferEvent(
            self.direction,
            outcome,
            len(self.digests),
            chunks,
            chunks * chunk_bytes,
            sent - self.submitted,
            now - sent,
            note,
        )


def _little_endian(ids: IdBuffer) -> bytes:
    return np.asarray(ids).astype("<i4", copy=False).tobytes()
