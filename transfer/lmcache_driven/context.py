"""The transfer context of workers that let the server copy: they hand over descriptors of their cache
and ask; the bytes go between the cache and the arena in the server's process.

A store is copied first and published when the worker, having been told so, commits it. So a worker
that has died, or has given its blocks to others meanwhile, never publishes anything.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from lmcache_kernels.chunk_layout import ChunkLayout
from lmcache_kernels.errors import (
    Closed,
    KVTransferError,
    PeerGone,
    RemoteError,
    TransferTimeout,
)
from lmcache_kernels.transfer.arguments import (
    check_port,
    check_transfer,
    instance_id,
    integer,
    list_of,
    one_of_kind,
)
from lmcache_kernels.transfer.asking import checked
from lmcache_kernels.transfer.cache_forms import ShardPart
from lmcache_kernels.transfer.engine_driven.worker import DEVICE_TIMEOUT
from lmcache_kernels.transfer.kv_groups import KVGroup
from lmcache_kernels.transfer.messages import (
    MAX_TRANSFERS,
    AbortStore,
    CommitStore,
    Copied,
    Done,
    Loaded,
    RegisterCache,
    Settle,
)
from lmcache_kernels.transfer.moving.movers import one_device
from lmcache_kernels.transfer.moving.moves import Over, copy_block_ids
from lmcache_kernels.transfer.observer import Guarded, NullObserver
from lmcache_kernels.transfer.sharing.wrapping import wrap_kv_caches
from lmcache_kernels.transfer.store_transfer import StoreTransfer, Transfer

from .asked import Asked
from .recorded_events import recorded_events
from .registration import ServedRegistration
from .settling import Settling

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lmcache_kernels.transfer.messages import Reply
    from lmcache_kernels.transfer.observer import Observer
    from lmcache_kernels.transfer.port import CachePort

logger = logging.getLogger(__name__)

COPY_TIMEOUT = 30.0
"""Seconds from a submit until its copy is over, its turn among the copies of the worker included: a TB
of link. Also what a registration may take, for which a server loads torch."""


class LmcacheDrivenContext:
    """Stores and loads chunks by asking a server, which copies them.

    Submits return at once and never raise for anything the server does: results and typed errors
    come through futures, each finished exactly once and within bounded time. Submit from one thread.
    Closing twice is fine.

    Args:
        kv_caches: the engine's cache by group. CPU tensors move into shared memory now, while nobody
            may write to them. Keep the tensors alive until :meth:`close`.
        chunk_tokens: tokens of one chunk.
        part: which part of the model's cache this worker holds.
        instance: id of this worker, below 2**63, which no other has; None: a random one.
        port: the cache.
        timeout: seconds a request may take that copies nothing.
        copy_timeout: seconds from a submit until its copy is over.
        max_programs: bound on the grid of every GPU kernel.
        observer: told of every transfer that ends.

    Attributes:
        instance: id of this worker.

    Raises:
        LayoutError: tensors that are not what was said of them or cannot be shared, or a chunk size
            that a block size does not divide.
        ConfigError: memory or events that cannot be shared, an argument of another kind, or a cache
            that works with other chunks.
        CapacityError: not enough shared memory.
    """

    decoding = False
    """See EngineDrivenContext.decoding; the server, which copies, is not told."""

    def __init__(
        self,
        kv_caches: Sequence[KVGroup],
        *,
        chunk_tokens: int,
        part: ShardPart,
        instance: int | None = None,
        port: CachePort,
        timeout: float = 2.0,
        copy_timeout: float = COPY_TIMEOUT,
        max_programs: int | None = None,
        observer: Observer | None = None,
    ) -> None:
        kv_caches = list_of("kv_caches", kv_caches, KVGroup)
        part = one_of_kind("part", part, ShardPart)
        self.instance = instance_id(instance)
        chunk_tokens = integer("chunk_tokens", chunk_tokens, 1)
        check_port(port, chunk_tokens)
        groups = [group.read() for group in kv_caches]
        device = one_device(groups)
        self.layout = ChunkLayout.of(groups, chunk_tokens)
        self.shard = part.shard(self.layout.fingerprint)
        self._port = port
        self._timeout = timeout
        self._copy_timeout = copy_timeout
        self._observer = Guarded(observer or NullObserver())
        self._events = recorded_events(device)  # before anything is shared
        self._wrapped = wrap_kv_caches(
            {
                f"group {number}, tensor {index}": tensor
                for number, group in enumerate(kv_caches)
                for index, tensor in enumerate(group.tensors)
            }
        )
        self.groups = tuple(group.read() for group in kv_caches)  # where they lie now
        descriptors = iter(self._wrapped.descriptors)
        message = RegisterCache(
            instance=self.instance,
            shard=self.shard,
            part=part,
            groups=[group.share(descriptors) for group in kv_caches],
            max_programs=max_programs,
        )
        self._server = ServedRegistration(port, message, chunk_tokens, copy_timeout)
        self._numbers = itertools.count(time.monotonic_ns())  # an id is never used again
        self._changed = threading.Condition()  # never held across a wait: submits take it
        self._closed = False
        self._open: dict[Transfer, Asked] = {}
        # Asks in order of submission, and may have to register first.
        self._asker = ThreadPoolExecutor(1, "lmcache-kernels-ask")
        self._settling = Settling(
            port, self._server, self.instance, timeout, gpu=device != "cpu", end=self._end
        )

    def register(self) -> None:
        """Register with the server; done again by itself when it restarts.

        Raises:
            KVTransferError: no server, or a refused registration.
        """
        self._server.ensure()

    def unregister(self, timeout: float = 5.0) -> None:
        """Have the server let go of the cache; the next transfer registers again."""
        self._server.unregister(timeout)

    # --- store ------------------------------------------------------------------------------------

    def submit_store(
        self, digests: Sequence[bytes], block_ids: Sequence[Sequence[int]], *, tenant: str = ""
    ) -> StoreTransfer:
        """Store chunks whose bytes the device will have written once its queued work is done.

        See :meth:`.engine_driven.context.EngineDrivenContext.submit_store`.
        """
        transfer = StoreTransfer()
        self._submit(transfer, digests, block_ids, tenant=tenant)
        return transfer

    def flush(self, transfers: Sequence[StoreTransfer], timeout: float = DEVICE_TIMEOUT) -> None:
        """Return when none of these stores reads the cache any more, or what it reads is nobody's.

        Stores that have not begun are stopped, and one that the server still copies after ``timeout``
        seconds is not published: its result is Closed, and its blocks may be overwritten either way.
        Commits are not waited for.
        """
        end = time.monotonic() + timeout
        begun = [one for one in transfers if not one.stop()]
        with self._changed:
            numbers = [self._open[one].number for one in begun if one in self._open]
        if numbers:
            message = Settle(instance=self.instance, transfers=numbers[:MAX_TRANSFERS])
            self._port.request(message, self._timeout)  # only sooner over with it, so not awaited
        for transfer in begun:
            if not transfer.wait_read(max(0.0, end - time.monotonic())):
                transfer.discard()
                logger.warning("the server still read the cache after %s s; not stored", timeout)

    def flush_inflight_stores(self, timeout: float = DEVICE_TIMEOUT) -> None:
        """:meth:`flush` of every store submitted and not finished."""
        with self._changed:
            found = list(self._open)
        self.flush([one for one in found if isinstance(one, StoreTransfer)], timeout)

    # --- retrieve ---------------------------------------------------------------------------------

    def submit_retrieve(
        self,
        digests: Sequence[bytes],
        block_ids: Sequence[Sequence[int]],
        *,
        skip_first_n_tokens: int = 0,
    ) -> Future[int]:
        """Load chunks into blocks of the cache.

        See :meth:`.engine_driven.context.EngineDrivenContext.submit_retrieve`. A server that is not heard of any
        more in the middle of a load is asked again, for ``timeout`` seconds, whether it is over.
        """
        transfer = Transfer()
        self._submit(transfer, digests, block_ids, skip_first_n_tokens)
        return transfer.result

    # --- the way of a transfer --------------------------------------------------------------------

    def _submit(
        self,
        transfer: Transfer,
        digests: Sequence[bytes],
        block_ids: Sequence[Sequence[int]],
        skip_tokens: int = 0,
        tenant: str = "",
    ) -> None:
        check_transfer(digests, block_ids, skip_tokens)
        ids = copy_block_ids(block_ids, self.layout, len(digests))
        asked = Asked(
            next(self._numbers),
            transfer,
            list(digests),
            ids,
            skip_tokens,
            self._events.record(),
            time.monotonic() + self._copy_timeout,
            tenant,
        )
        with self._changed:
            self._open[transfer] = asked
            refused = self._closed
            if not refused:
                task = self._asker.submit(self._ask, asked)
        if refused:
            self._end(asked, Closed("the transfer context is closed"))
        else:
            task.add_done_callback(lambda task: self._if_cancelled(asked, task))

    def _if_cancelled(self, asked: Asked, task: Future[None]) -> None:
        if task.cancelled():
            self._end(asked, Closed("the transfer context was closed before this began"))

    def _ask(self, asked: Asked) -> None:
        """In the asking thread."""
        try:
            if not asked.digests:
                self._end(asked, 0)
                return
            message = asked.message(self.instance, self.groups)
            if time.monotonic() >= asked.deadline:
                raise TransferTimeout("the transfer could not begin in time")
            asked.incarnation = self._server.ensure()
            if not asked.transfer.begin():
                raise Closed("the transfer was stopped before it began")
            asked.sent = time.monotonic()
            future = self._port.request(message, max(0.0, asked.deadline - asked.sent))
        except BaseException as error:
            self._end(asked, error)
            return
        answered = self._copied if asked.direction == "store" else self._loaded
        future.add_done_callback(lambda future: self._guard(asked, lambda: answered(asked, future)))

    # In the port's thread, which must not wait:

    def _guard(self, asked: Asked, action: Callable[[], None]) -> None:
        try:
            action()
        except BaseException as error:
            self._end(asked, error)

    def _copied(self, asked: Asked, future: Future[Reply]) -> None:
        reply = checked(future.result(), "StoreBlocks", Copied)
        transfer = asked.transfer
        if not reply.chunks or not isinstance(transfer, StoreTransfer):
            self._end(asked, 0)
            return
        transfer.launched(Over())
        if self._port.incarnation != asked.incarnation:
            # A successor counts its tickets anew, and must not be told of an old one.
            raise PeerGone("the cache server was lost before the store was committed")
        if not transfer.wanted:
            abort = AbortStore(instance=self.instance, ticket=reply.ticket)
            self._port.request(abort, self._timeout)
            raise Closed("the blocks were reused while the store read them")
        commit = CommitStore(instance=self.instance, ticket=reply.ticket)

        def committed(future: Future[Reply]) -> None:
            checked(future.result(), "CommitStore", Done)
            self._end(asked, reply.chunks)

        self._port.request(commit, self._timeout).add_done_callback(
            lambda future: self._guard(asked, lambda: committed(future))
        )

    def _loaded(self, asked: Asked, future: Future[Reply]) -> None:
        try:
            self._end(asked, checked(future.result(), "LoadBlocks", Loaded).chunks)
        except RemoteError as error:  # so the server knows that nothing goes on
            self._end(asked, error)
        except KVTransferError as error:
            self._settling.add(asked, error)

    # --- the end ----------------------------------------------------------------------------------

    def _end(self, asked: Asked, end: int | BaseException) -> None:
        """The transfer is over: so many chunks, or an error."""
        with self._changed:
            if asked.over:
                return
            asked.over = True
        self._events.acknowledge(asked.event)
        if isinstance(end, RemoteError):
            if end.code == "unknown_instance":
                self._server.forget()
            elif end.code == "stopped":
                end = Closed(str(end))
        self._observer.transfer_over(asked.observed(end, self.layout.nbytes))
        if isinstance(end, BaseException):
            logger.debug("%s failed: %s", asked.direction, end, exc_info=end)
            asked.transfer.result.set_exception(end)
        else:
            asked.transfer.result.set_result(end)
        with self._changed:
            del self._open[asked.transfer]
            self._changed.notify_all()

    def close(self, timeout: float = 5.0) -> None:
        """Stop what has not begun, wait for what has, unregister, let go of the cache.

        Takes at most about twice ``timeout`` seconds.
        """
        with self._changed:
            if self._closed:
                return
            self._closed = True
            under_way = list(self._open)
        for transfer in under_way:
            transfer.stop()
        self._asker.shutdown(wait=False, cancel_futures=True)
        self._server.close(timeout)
        with self._changed:
            if not self._changed.wait_for(lambda: not self._open, timeout):
                logger.warning(
                    "worker %d: %d transfers are not over %s s after close",
                    *(self.instance, len(self._open), timeout),
                )
        self._settling.close()
        self._wrapped.close()
