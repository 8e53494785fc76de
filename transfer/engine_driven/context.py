"""The engine-driven transfer context: the worker itself moves chunks between its paged cache and the
server's arena. A store is prepare, gather, commit; a retrieve is prepare, scatter, commit."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from lmcache_kernels.chunk_copy import check_layers
from lmcache_kernels.chunk_layout import ChunkLayout
from lmcache_kernels.plane import CacheGroup
from lmcache_kernels.transfer.arguments import (
    check_port,
    check_transfer,
    instance_id,
    integer,
    list_of,
)
from lmcache_kernels.transfer.moving.movers import mover_for, one_device
from lmcache_kernels.transfer.moving.moves import copy_block_ids
from lmcache_kernels.transfer.moving.nvtx import nvtx_ranges
from lmcache_kernels.transfer.observer import Guarded, NullObserver
from lmcache_kernels.transfer.store_transfer import StoreTransfer, Transfer

from .lane import Lane
from .layered_load import LayeredLoad
from .layered_store import LayeredStore
from .loading import Load, Loading
from .registration import Registration
from .storing import Store, Storing
from .worker import DEVICE_TIMEOUT, Worker, shard_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from lmcache_kernels.chunk_copy import Layers
    from lmcache_kernels.transfer.moving.moves import Mover
    from lmcache_kernels.transfer.observer import Observer
    from lmcache_kernels.transfer.port import CachePort

logger = logging.getLogger(__name__)


class EngineDrivenContext:
    """Moves chunks between an engine's cache and a cache server's arena.

    Submits return at once (on a CPU engine: when the work is done) and never raise for anything
    the server does: results and typed errors come through futures, each finished exactly once.
    Stores are carried out in the order of their submission, and so are loads; neither waits for the
    other. Submit from one thread. Closing twice is fine.

    Args:
        groups: the engine's cache; keep its tensors alive until :meth:`close`.
        chunk_tokens: tokens of one chunk.
        shard: id of the slice of the model's cache that this worker holds, from the layout's
            fingerprint.
        instance: id of this worker, below 2**63, which no other has; None: a random one.
        port: the cache.
        timeout: seconds a single request may take.
        load_patience: seconds after which a load that has not begun fails, its blocks untouched.
        max_programs: bound on the grid of every GPU kernel.
        mover: makes what moves chunks; None: what suits the device, with ``max_programs``.
        observer: told of every transfer that ends.

    Attributes:
        instance: id of this worker.

    Raises:
        LayoutError: groups on several devices, or a chunk size that a block size does not divide.
        ConfigError: an argument of another kind, or a cache that works with other chunks.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        *,
        chunk_tokens: int,
        shard: Callable[[ChunkLayout], bytes],
        instance: int | None = None,
        port: CachePort,
        timeout: float = 2.0,
        load_patience: float = 10.0,
        max_programs: int | None = None,
        mover: Callable[[Sequence[CacheGroup], ChunkLayout], Mover] | None = None,
        observer: Observer | None = None,
    ) -> None:
        self.groups = list_of("groups", groups, CacheGroup)
        self.instance = instance_id(instance)
        chunk_tokens = integer("chunk_tokens", chunk_tokens, 1)
        check_port(port, chunk_tokens)
        device = one_device(self.groups)
        self.layout = ChunkLayout.of(self.groups, chunk_tokens)
        self.shard = shard_of(shard, self.layout)
        if mover is None:
            self._mover = mover_for(self.groups, self.layout, max_programs)
        else:
            self._mover = mover(self.groups, self.layout)
        self._server = Registration(
            port,
            instance=self.instance,
            shard=self.shard,
            chunk_tokens=chunk_tokens,
            payload_bytes=self.layout.nbytes,
            pin=device != "cpu",
            timeout=timeout,
        )
        parts = Worker(
            self.instance, self.groups, self.layout, self._server, self._mover, nvtx_ranges(device)
        )
        self._storing, self._loading = Storing(parts), Loading(parts)
        self._load_patience = load_patience
        guarded = Guarded(observer or NullObserver())
        self._stores, self._loads = (
            Lane(
                direction,
                threads=not self._mover.synchronous,
                observer=guarded,
            )
            for direction in ("store", "load")
        )

    @property
    def decoding(self) -> bool:
        """Whether the engine decodes at present, as it has said last; at first it does not.

        Transfers that begin meanwhile take ways that leave its memory and multiprocessors alone, even
        where others are a little faster.
        """
        return self._mover.decoding

    @decoding.setter
    def decoding(self, now: bool) -> None:
        self._mover.decoding = now

    def register(self) -> None:
        """Register with the server and map its arena; done again by itself when it restarts.

        Where the arena cannot be mapped a warning says so, and chunks go through the server's socket.

        Raises:
            KVTransferError: no server, or a refused registration.
        """
        self._mover.prepare()
        with self._server.attached():
            pass

    # --- store ------------------------------------------------------------------------------------

    def submit_store(
        self, digests: Sequence[bytes], block_ids: Sequence[Sequence[int]], *, tenant: str = ""
    ) -> StoreTransfer:
        """Store chunks whose bytes the device will have written once its queued work is done.

        Args:
            digests: one a chunk, none twice.
            block_ids: per group, the blocks of those chunks in order; a tail that is no whole
                chunk is ignored. None of them may be reused before :meth:`flush` of the transfer,
                or its result, came back. The lists themselves are copied.
            tenant: out of whose quota, if the cache has one for it; at most 128 printable characters
                without ``@ / \\``.

        Returns:
            The transfer. Its result is LayoutError if an id cannot be right or a chunk is named
            twice; nothing was moved or reserved then.

        Raises:
            LayoutError: not one list a group, or too few ids; nothing was submitted.
        """
        transfer = StoreTransfer()
        self._submit_store(transfer, digests, block_ids, tenant)
        return transfer

    def submit_layered_store(
        self,
        digests: Sequence[bytes],
        block_ids: Sequence[Sequence[int]],
        layers: Sequence[Sequence[int]],
        *,
        tenant: str = "",
    ) -> LayeredStore:
        """:meth:`submit_store` of chunks that the engine is about to compute, layer by layer.

        The server is asked for room at once, and each layer is read once the engine has told the
        store that it is :meth:`~.layered_store.LayeredStore.saved`: when its work is done, all but
        the last layers are on the link. On a CPU engine all is done with the last layer.

        Args:
            digests: one a chunk; what is there twice is stored once.
            layers: per group, for each of its layers in the order of its tensors, its place in the
                order in which the engine computes them.

        Returns:
            The store. It fails, and nothing of it is ever found, if it is flushed, or the context
            closed, before the last layer was saved, or if that takes more than a minute.

        Raises:
            LayoutError: see :meth:`submit_store`; or layers that are not those of the cache.
        """
        store = LayeredStore(self._mover, layers, check_layers(layers, self.groups))
        self._submit_store(store, digests, block_ids, tenant)
        return store

    def _submit_store(
        self,
        transfer: StoreTransfer,
        digests: Sequence[bytes],
        block_ids: Sequence[Sequence[int]],
        tenant: str,
    ) -> None:
        check_transfer(digests, block_ids)
        ids = copy_block_ids(block_ids, self.layout, len(digests))
        store = Store(transfer, list(digests), ids, self._mover.ready(), tenant)
        self._stores.submit(transfer, self._storing.run(store), len(store.digests))

    def flush(self, transfers: Sequence[StoreTransfer], timeout: float = DEVICE_TIMEOUT) -> None:
        """Return when none of these stores reads the cache any more; needs no server.

        Stores whose gather has not begun are stopped, and so are those by layers of which a layer
        was not saved yet. One that still reads after ``timeout`` seconds is not published: its
        result is Closed, and its blocks may be overwritten either way. Commits are not waited for.
        """
        end = time.monotonic() + timeout
        for transfer in [one for one in transfers if not one.stop()]:
            if not transfer.wait_read(max(0.0, end - time.monotonic())):
                transfer.discard()
                logger.warning("a gather still read the cache after %s s; not stored", timeout)

    def flush_inflight_stores(self, timeout: float = DEVICE_TIMEOUT) -> None:
        """:meth:`flush` of every store submitted and not finished."""
        open_stores = self._stores.transfers()
        self.flush([one for one in open_stores if isinstance(one, StoreTransfer)], timeout)

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
            digests: one a chunk, none twice.
            block_ids: per group, the blocks of those chunks in order; ``ABSENT`` ones and a tail
                that is no whole chunk are left alone. The lists themselves are copied.
            skip_first_n_tokens: leave the blocks of the first tokens alone, rounded down to blocks.

        Returns:
            How many chunks, from the first on, now are in the cache. Fewer than asked means that
            the blocks of the others hold nothing usable; an exception means that of all of them.
            Once it is finished nothing of this load writes into the cache any more. LayoutError if
            an id cannot be right or a chunk is named twice, TransferTimeout if the load could not
            begin in time; no block was touched then.

        Raises:
            LayoutError: not one list a group, too few ids, or a skip below 0; nothing was submitted.
        """
        transfer = Transfer()
        self._submit_load(transfer, digests, block_ids, skip_first_n_tokens, None)
        return transfer.result

    def submit_layered_retrieve(
        self,
        digests: Sequence[bytes],
        block_ids: Sequence[Sequence[int]],
        layers: Sequence[Sequence[int]],
        *,
        skip_first_n_tokens: int = 0,
    ) -> LayeredLoad:
        """:meth:`submit_retrieve`, first layers first, for an engine that begins with these.

        Args:
            layers: per group, for each of its layers in the order of its tensors, its place in the
                order in which the engine needs them.

        Returns:
            The load: its ``result`` is that of any load, its ``wait_layer`` makes the device wait.

        Raises:
            LayoutError: see :meth:`submit_retrieve`.
        """
        load = LayeredLoad(self._mover)
        self._submit_load(load, digests, block_ids, skip_first_n_tokens, layers)
        return load

    def _submit_load(
        self,
        transfer: Transfer,
        digests: Sequence[bytes],
        block_ids: Sequence[Sequence[int]],
        skip_tokens: int,
        layers: Layers | None,
    ) -> None:
        check_transfer(digests, block_ids, skip_tokens)
        load = Load(
            transfer,
            list(digests),
            copy_block_ids(block_ids, self.layout, len(digests)),
            skip_tokens=skip_tokens,
            after=self._mover.ready(),
            begin_by=time.monotonic() + self._load_patience,
            layers=layers,
        )
        self._loads.submit(transfer, self._loading.run(load), len(load.digests))

    # --- the end ----------------------------------------------------------------------------------

    def close(self, timeout: float = 5.0) -> None:
        """Drop what has not begun, wait for what has, unregister, let go of the arena.

        Takes at most about twice ``timeout`` seconds. What the device has not finished by then keeps
        its part of the arena, and reads or writes the engine's cache on.
        """
        lanes = (self._stores, self._loads)
        for lane in lanes:
            lane.close()
        end = time.monotonic() + timeout
        idle = all(lane.wait_idle(max(0.0, end - time.monotonic())) for lane in lanes)
        settled = idle and self._storing.settled()
        self._server.close(timeout, unregister=settled)
        if settled:
            self._mover.close()
        else:
            logger.warning(
                "worker %d: transfers still run %s s after close", self.instance, timeout
            )
