"""The giving end of a hand-over: blocks of this process's cache written into another process's.

There is no host memory between: the block copy of the bottom layer writes to the peer's pages where
they are, over NVLink if they are on another GPU.
"""

from __future__ import annotations

import logging
import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch

from lmcache_kernels.copying import PreparedCopy
from lmcache_kernels.errors import Closed, LayoutError, TransferFailed, TransferTimeout
from lmcache_kernels.plane import CacheGroup
from lmcache_kernels.transfer.arguments import list_of
from lmcache_kernels.transfer.moving.device import CudaDevice, EventCompletion
from lmcache_kernels.transfer.moving.movers import one_device
from lmcache_kernels.transfer.sharing.descriptors import decode

from .peer_memory import open_for
from .peer_signals import PEER_TIMEOUT, PeerSignals, check_alive, split_name, wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

logger = logging.getLogger(__name__)


class PeerCopy:
    """Writes blocks of this process's cache into the cache of another process.

    Both lie in GPU memory, of one GPU or of two that reach each other, or both in host memory. The
    layouts may differ as those of a block copy may: strides are free, the rest is equal.

    Safe for threads; the copies of one object run one after the other, on a GPU in a stream of low
    priority that is nobody else's.

    Args:
        groups: this process's cache; keep its tensors alive until :meth:`close`.
        offer: of the peer's :class:`PeerTarget`.
        describe: makes groups of the peer's tensors, which it gets in the order in which they were
            offered; as many as ``groups``, each with the same meaning. For example
            ``lambda tensors: [group_of(tensors, "kv block head token dim")]``.
        max_programs: bound on the GPU grid, to leave the model its multiprocessors.

    Attributes:
        device: that copies: the one of ``groups``.

    Raises:
        LayoutError: groups that do not fit, on several devices, or in another kind of memory than
            the peer's; nothing was written.
        PeerGone: the peer has ended or closed its target.
        RemoteProtocolError: not an offer, or the memory is not what it says.
        ConfigError: GPUs that do not reach each other.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        offer: bytes,
        describe: Callable[[list[torch.Tensor]], Sequence[CacheGroup]],
        *,
        max_programs: int | None = None,
    ) -> None:
        groups = list_of("groups", groups, CacheGroup)
        self.device = one_device(groups)
        self._peer, tensors = split_name(offer, "offer")
        descriptors = decode(tensors)
        check_alive(self._peer)
        with ExitStack() as undo:
            self._opened = open_for(descriptors, self.device)
            undo.callback(self._opened.close)
            described = describe(self._opened.tensors)
            theirs = list_of("the peer's groups", described, CacheGroup)
            _check_alike(theirs, groups)
            pairs = [
                list(zip(to.planes, origin.planes, strict=True))
                for to, origin in zip(theirs, groups, strict=True)
            ]
            self._prepared = PreparedCopy(pairs, max_programs=max_programs)
            self._signals = PeerSignals()
            undo.callback(self._signals.close)
            self._stream = None if self.device == "cpu" else _CopyStream(self.device)
            undo.pop_all()
        self._lock = threading.Lock()  # held while a copy is queued, never while one waits
        self._last: torch.cuda.Event | None = None
        self._closed = False

    def copy(
        self,
        dst_blocks: Sequence[Iterable[int]],
        src_blocks: Sequence[Iterable[int]],
        *,
        after: bytes | None = None,
        timeout: float = PEER_TIMEOUT,
    ) -> bytes:
        """Write blocks ``src_blocks[g][i]`` of group ``g`` into the peer's ``dst_blocks[g][i]``.

        What is queued on the calling thread's current stream happens before it. On a GPU this
        returns when the copy is queued; the source blocks must stay as they are until
        :meth:`flush`. In host memory it is done on return.

        Args:
            dst_blocks, src_blocks: block ids, per group and pairwise; no destination twice. A
                destination of ``ABSENT`` (-1) leaves its block out.
            after: a signal of the peer, which is waited for first: its blocks may be written. None:
                the caller knows that they may.
            timeout: seconds that the signal may take.

        Returns:
            The signal that the blocks are there, for :meth:`PeerTarget.wait`. It stands until
            this is closed or has copied 255 times more.

        Raises:
            PeerGone: the peer has ended or closed its target.
            TransferTimeout: the signal did not come in time.
            LayoutError: bad block ids.
            RemoteProtocolError: ``after`` is no signal.
            Closed: after :meth:`close`.
            TransferFailed: CUDA reports an error; of the others none has written anything.
        """
        self._check_open(dst_blocks, src_blocks)
        check_alive(self._peer)
        if after is not None:
            wait_for(after, self.device, timeout)
        ids = list(zip(dst_blocks, src_blocks, strict=True))
        with self._lock:
            self._check_open(dst_blocks, src_blocks)
            self._last = self._queue(ids)
            return self._signals.signal(self._last)

    def _check_open(self, *lists: Sequence[Iterable[int]]) -> None:
        if self._closed:
            raise Closed("the peer copy is closed")
        for blocks in lists:
            if len(blocks) != self._prepared.plan.groups:
                raise LayoutError(
                    f"blocks: expected lists for {self._prepared.plan.groups} groups, "
                    f"got {len(blocks)}"
                )

    def _queue(self, ids: list[tuple[Iterable[int], Iterable[int]]]) -> torch.cuda.Event | None:
        if self._stream is None:
            self._prepared.copy_groups(ids)
            return None
        try:
            return self._stream.run(lambda: self._prepared.copy_groups(ids))
        except RuntimeError as error:
            raise TransferFailed(f"copy to peer {self._peer}: CUDA failed: {error}") from error

    def flush(self, timeout: float = PEER_TIMEOUT) -> None:
        """Return when no copy reads this cache or writes into the peer's any more.

        Raises:
            TransferTimeout: one still did after ``timeout`` seconds.
            TransferFailed: CUDA reports an error of earlier work.
        """
        last = self._last
        try:
            done = last is None or EventCompletion(last).wait(timeout)
        except RuntimeError as error:
            raise TransferFailed(f"copies to peer {self._peer}: CUDA failed: {error}") from error
        if not done:
            raise TransferTimeout(f"copies to peer {self._peer}: not done within {timeout} s")

    def close(self, timeout: float = 5.0) -> None:
        """Wait for the copies that are queued, then let go of the peer's memory. Idempotent.

        The signals that :meth:`copy` returned are gone too: close when the peer has waited for
        them. Copies that are not done after ``timeout`` seconds keep the memory mapped.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
        try:
            self.flush(timeout)
        except (TransferTimeout, TransferFailed) as error:
            logger.warning("the peer's memory stays mapped: %s", error)
        else:
            self._opened.close()
            if self._stream is not None:
                self._stream.close()
        self._signals.close()

    def __enter__(self) -> PeerCopy:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


_USE = "hand over"


class _CopyStream:
    """A stream of a GPU that nobody else uses."""

    def __init__(self, device: str) -> None:
        self._device = CudaDevice(device)
        with self._device.current():
            self._stream = self._device.stream(_USE)

    def run(self, launch: Callable[[], None]) -> torch.cuda.Event:
        """Queue what ``launch`` does behind the current stream; the event that it is done."""
        with self._device.current():
            before = self._device.event()
            self._device.record(before, torch.cuda.current_stream())
            self._device.wait(self._stream, before)
            with self._device.on(self._stream):
                launch()
            done = torch.cuda.Event(interprocess=True)
            done.record(self._stream)
        return done

    def close(self) -> None:
        """Nothing is queued any more."""
        self._device.give_back(self._stream, _USE)


def _check_alike(theirs: Sequence[CacheGroup], ours: Sequence[CacheGroup]) -> None:
    """Raise LayoutError unless the groups mean the same; the copy itself checks the planes."""
    if len(theirs) != len(ours):
        raise LayoutError(f"the peer's groups: expected {len(ours)} as here, got {len(theirs)}")
    for number, (their, our) in enumerate(zip(theirs, ours, strict=True)):
        for name in ("dtype", "opaque", "block_tokens", "tokens_per_state"):
            want, got = getattr(our, name), getattr(their, name)
            if want != got:
                raise LayoutError(
                    f"the peer's groups[{number}].{name}: expected {want!r} as here, got {got!r}"
                )
        if len(their.planes) != len(our.planes):
            raise LayoutError(
                f"the peer's groups[{number}].planes: expected {len(our.planes)} as here, "
                f"got {len(their.planes)}"
            )
