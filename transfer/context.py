"""The engine-driven transfer context: the worker itself moves chunks between its paged cache and the
server's arena. A store is prepare, gather, commit; a retrieve is prepare, scatter, commit."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any

from lmcache_kernels.chunk_layout import ChunkLayout
from lmcache_kernels.errors import (
    Closed,
    LayoutError,
    RemoteProtocolError,
    TransferFailed,
)

from .host_mover import HostMover
from .messages import (
    AbortStore,
    CommitRetrieve,
    CommitStore,
    Done,
    LoadSlots,
    PrepareRetrieve,
    PrepareStore,
    StoreSlots,
)
from .moves import blocks_of, check_block_ids
from .registration import Registration
from .store_transfer import StoreTransfer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lmcache_kernels.plane import CacheGroup

    from .attachment import Attachment
    from .moves import Completion, Mover
    from .port import CachePort

logger = logging.getLogger(__name__)

DEVICE_TIMEOUT = 60.0
"""Seconds after which queued device work counts as lost; 60 s of link is 3 TB."""


class EngineDrivenContext:
    """Moves chunks between an engine's cache and a cache server's arena.

    Submits return at once (on a CPU engine: when the work is done) and never raise for anything
    the server does: results and typed errors come through futures, each finished exactly once.
    Submit from one thread. Closing twice is fine.

    Args:
        groups: the engine's cache; keep its tensors alive until :meth:`close`.
        chunk_tokens: tokens of one chunk.
        shard: id of the slice of the model's cache that this worker holds, from the layout's
            fingerprint.
        instance: id of this worker, random, 63 bits.
        port: the cache.
        timeout: seconds a single request may take.
        max_programs: bound on the grid of every GPU kernel.

    Raises:
        LayoutError: groups on several devices, or a chunk size that a block size does not divide.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        *,
        chunk_tokens: int,
        shard: Callable[[ChunkLayout], bytes],
        instance: int,
        port: CachePort,
        timeout: float = 2.0,
        max_programs: int | None = None,
    ) -> None:
        devices = {group.device for group in groups}
        if len(devices) > 1:
            raise LayoutError(f"groups: expected one device, got {', '.join(sorted(devices))}")
        self.groups = tuple(groups)
        self.layout = ChunkLayout.of(self.groups, chunk_tokens)
        self.shard = shard(self.layout)
        self._instance = instance
        self._mover = _mover_for(self.groups, self.layout, max_programs)
        self._server = Registration(
            port,
            instance=instance,
            shard=self.shard,
            payload_bytes=self.layout.nbytes,
            pin=not self._mover.synchronous,
            timeout=timeout,
        )
        self._lock = threading.Lock()  # never held across a wait: submits take it
        self._closed = False
        self._stores: set[StoreTransfer] = set()
        self._queued: set[Future[None]] = set()
        # One thread a direction: a load never waits behind a store, and order within a direction
        # is the order of submission. A synchronous mover works on the caller's thread instead.
        self._executors = {
            name: None
            if self._mover.synchronous
            else ThreadPoolExecutor(1, f"lmcache-kernels-{name}")
            for name in ("store", "load")
        }

    # --- registration -----------------------------------------------------------------------------

    def register(self) -> None:
        """Register with the server and attach its arena; done again by itself when it restarts.

        Raises:
            KVTransferError: no server, a refused registration, or an arena that cannot be attached.
        """
        self._server.attached().release()

    # --- store ------------------------------------------------------------------------------------

    def submit_store(
        self, digests: Sequence[bytes], block_ids: Sequence[Sequence[int]]
    ) -> StoreTransfer:
        """Store chunks whose bytes the device will have written once its queued work is done.

        Args:
            digests: one a chunk.
            block_ids: per group, the blocks of those chunks in order; a tail that is no whole
                chunk is ignored. None of them may be reused before :meth:`flush` of the transfer,
                or its result, came back.

        Raises:
            LayoutError: block ids that cannot be right; nothing was submitted.
        """
        check_block_ids(block_ids, self.groups, self.layout, len(digests), loading=False)
        transfer = StoreTransfer()
        with self._lock:
            self._stores.add(transfer)
        transfer.result.add_done_callback(lambda _: self._store_over(transfer))
        after = self._mover.ready()
        ids = [list(group) for group in block_ids]
        self._run(
            "store", transfer.result, lambda: self._store(transfer, list(digests), ids, after)
        )
        return transfer

    def _store(
        self,
        transfer: StoreTransfer,
        digests: list[bytes],
        block_ids: list[list[int]],
        after: Completion | None,
    ) -> int:
        if not digests:
            return 0
        arena = self._server.attached()
        try:
            slots = self._server.ask_as_worker(
                PrepareStore(instance=self._instance, digests=b"".join(digests)), StoreSlots
            )
            if not slots.indices:
                return 0
            try:
                return self._fill_slots(transfer, arena, slots, digests, block_ids, after)
            except TransferFailed:
                raise  # the device may still write into the slots: only time gives them back
            except BaseException:
                self._server.tell(AbortStore(instance=self._instance, ticket=slots.ticket))
                raise
        finally:
            arena.release()

    def _store_over(self, transfer: StoreTransfer) -> None:
        transfer.over()
        with self._lock:
            self._stores.discard(transfer)

    def _fill_slots(
        self,
        transfer: StoreTransfer,
        arena: Attachment,
        slots: StoreSlots,
        digests: list[bytes],
        block_ids: list[list[int]],
        after: Completion | None,
    ) -> int:
        arena.check_slots(slots.offsets)
        indices = slots.indices
        if len(indices) != len(slots.offsets) or not set(indices) <= set(range(len(digests))):
            raise RemoteProtocolError(
                f"slots: expected one for each of some of {len(digests)} chunks, got chunks "
                f"{indices} and {len(slots.offsets)} offsets"
            )
        moves = []
        for index, offset in zip(indices, slots.offsets, strict=True):
            arena.erase_header(offset)
            moves.append(arena.move(offset, blocks_of(block_ids, self.layout, index)))
        if not transfer.begin():
            raise Closed("the store was stopped before it read the cache")
        moved = self._mover.gather(moves, after)
        transfer.launched(moved.cache_free)
        if not moved.done.wait(DEVICE_TIMEOUT):
            raise TransferFailed(f"the device did not finish a gather in {DEVICE_TIMEOUT} s")
        if not transfer.wanted:
            raise Closed("the blocks were reused while the store read them")
        for index, offset, found in zip(indices, slots.offsets, moved.fingerprints(), strict=True):
            arena.write_header(offset, digests[index], found)
        self._server.ask(CommitStore(instance=self._instance, ticket=slots.ticket), Done)
        return len(indices)

    def flush(self, transfers: Sequence[StoreTransfer], timeout: float = DEVICE_TIMEOUT) -> None:
        """Return when none of these stores reads the cache any more.

        Stores whose gather has not begun are stopped, and one that still reads after ``timeout``
        seconds is not published: its result is Closed, and its blocks may be overwritten either
        way. Commits are not waited for.
        """
        for transfer in transfers:
            if not transfer.stop() and not transfer.wait_read(timeout):
                transfer.discard()
                logger.warning("a gather still read the cache after %s s; not stored", timeout)

    def flush_inflight_stores(self, timeout: float = DEVICE_TIMEOUT) -> None:
        """:meth:`flush` of every store submitted and not finished."""
        with self._lock:
            transfers = list(self._stores)
        self.flush(transfers, timeout)

    # --- retrieve ---------------------------------------------------------------------------------

    def submit_retrieve(
        self,
        digests: Sequence[bytes],
        block_ids: Sequence[Sequence[int]],
        *,
        skip_first_n_tokens: int = 0,
    ) -> Future[int]:
        """Load chunks into blocks of the cache.

        Args:
            digests: one a chunk.
            block_ids: per group, the blocks of those chunks in order; ``ABSENT`` ones and a tail
                that is no whole chunk are left alone.
            skip_first_n_tokens: leave the blocks of the first tokens alone, rounded down to blocks.

        Returns:
            How many chunks, from the first on, now are in the cache. Fewer than asked means that
            the blocks of the others hold nothing usable; an exception means that of all of them.

        Raises:
            LayoutError: block ids that cannot be right; nothing was submitted.
        """
        check_block_ids(block_ids, self.groups, self.layout, len(digests), loading=True)
        result: Future[int] = Future()
        after = self._mover.ready()
        ids = [list(group) for group in block_ids]
        self._run(
            "load",
            result,
            lambda: self._retrieve(list(digests), ids, skip_first_n_tokens, after),
        )
        return result

    def _retrieve(
        self,
        digests: list[bytes],
        block_ids: list[list[int]],
        skip_tokens: int,
        after: Completion | None,
    ) -> int:
        if not digests:
            return 0
        arena = self._server.attached()
        try:
            slots = self._server.ask_as_worker(
                PrepareRetrieve(instance=self._instance, digests=b"".join(digests)), LoadSlots
            )
            if not slots.offsets:
                return 0
            damaged: list[int] = []
            try:
                arena.check_slots(slots.offsets)
                moves, expected = [], []
                for index, (offset, digest) in enumerate(zip(slots.offsets, digests, strict=False)):
                    stored = arena.fingerprint_of(offset, digest)
                    if stored is None:
                        damaged.append(index)
                        break
                    blocks = blocks_of(block_ids, self.layout, index, skip_tokens)
                    moves.append(arena.move(offset, blocks))
                    expected.append(stored)
                moved = self._mover.scatter(moves, after)
                while not moved.done.wait(DEVICE_TIMEOUT):
                    # The one wait without an end: whoever was told that the load is over would give
                    # its blocks to others while the device may still write into them.
                    logger.error("the device has not finished a scatter in %s s", DEVICE_TIMEOUT)
                for index, (want, got) in enumerate(
                    zip(expected, moved.fingerprints(), strict=True)
                ):
                    if want != got:
                        logger.warning(
                            "chunk %s is damaged: fingerprint %016x, stored as %016x",
                            digests[index].hex()[:16],
                            got,
                            want,
                        )
                        damaged.append(index)
                        return index
                return len(moves)
            finally:
                self._server.tell(
                    CommitRetrieve(instance=self._instance, ticket=slots.ticket, damaged=damaged)
                )
        finally:
            arena.release()

    # --- helpers ----------------------------------------------------------------------------------

    def _run(self, direction: str, result: Future[Any], work: Callable[[], Any]) -> None:
        def task() -> None:
            try:
                result.set_result(work())
            except BaseException as error:
                logger.debug("%s failed: %s", direction, error, exc_info=True)
                result.set_exception(error)
                if not isinstance(error, Exception):
                    raise

        executor = self._executors[direction]
        if executor is None:
            task()
            return
        try:
            queued = executor.submit(task)
        except RuntimeError:
            result.set_exception(Closed("the transfer context is closed"))
            return
        with self._lock:
            self._queued.add(queued)
        queued.add_done_callback(lambda _: self._task_over(queued, result))

    def _task_over(self, queued: Future[None], result: Future[Any]) -> None:
        with self._lock:
            self._queued.discard(queued)
        if queued.cancelled():
            result.set_exception(Closed("the transfer context was closed before this began"))

    def close(self, timeout: float = 5.0) -> None:
        """Drop what has not begun, wait for what has, unregister, let go of the arena.

        Takes at most about twice ``timeout`` seconds; work that goes on longer keeps its memory.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            stores = list(self._stores)
        for transfer in stores:
            transfer.stop()
        for executor in self._executors.values():
            if executor is not None:
                executor.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            queued = list(self._queued)
        unfinished = wait(queued, timeout).not_done
        self._server.close(timeout)
        if unfinished:
            logger.warning("%d transfers still run %s s after close", len(unfinished), timeout)
        else:
            self._mover.close()


def _mover_for(
    groups: tuple[CacheGroup, ...], layout: ChunkLayout, max_programs: int | None
) -> Mover:
    if groups[0].device == "cpu":
        return HostMover(groups, layout)
    from .gpu_mover import GpuMover

    return GpuMover(groups, layout, max_programs=max_programs)
