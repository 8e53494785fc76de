"""Tensors in host memory: moved into a shared-memory segment that other processes can open.

Ordinary memory cannot be shared afterwards. So the first tensor of a storage that is wrapped moves
the whole storage into a segment, and it and every other tensor of the storage that is wrapped then
or later is pointed at the segment where it stands: the engine keeps its tensor objects. A segment
lasts as long as a tensor lies in it.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import weakref
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from lmcache_kernels.errors import LayoutError, LocalProtocolError
from lmcache_kernels.transfer.memory.arena import Arena

from .descriptors import CpuShare, describe
from .opening import OpenOnce

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .descriptors import TensorDescriptor
    from .opening import Mapped, Opened

    Buffer: TypeAlias = ctypes.Array[ctypes.c_ubyte]

logger = logging.getLogger(__name__)


class CpuSharing:
    """The CPU tensors that this process shares, and those of others that it has open.

    Safe for threads: while one has a :meth:`wrap` open, others that wrap wait.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._segments: dict[StorageWeakRef, _Segment] = {}  # by old and by new storage
        self._opened: OpenOnce[str] = OpenOnce()

    @contextmanager
    def wrap(self, tensor: torch.Tensor) -> Iterator[TensorDescriptor]:
        """Put ``tensor`` into shared memory and describe it, unless it is there already.

        Nobody may write to the tensor meanwhile. An exception inside the ``with`` takes back what
        this call did: the tensor is where it was, and a segment that was made is gone. Until then
        the old memory is kept.

        Raises:
            LayoutError: a tensor that is not dense in some order of its axes.
            CapacityError: /dev/shm is too small.
        """
        if tensor.numel() == 0:
            yield describe(tensor, CpuShare(segment="", nbytes=0, offset=0))
            return
        _check_dense(tensor)
        with self._lock, ExitStack() as undo:
            origin = tensor.untyped_storage()
            found = self._find(origin)
            segment, storage = found or self._make(origin, undo)
            if storage.data_ptr() != origin.data_ptr():
                self._segments[StorageWeakRef(storage)] = segment
                _move(tensor, storage, undo)
            offset = tensor.data_ptr() - storage.data_ptr()
            share = CpuShare(segment=segment.name, nbytes=segment.nbytes, offset=offset)
            yield describe(tensor, share)
            undo.pop_all()
            del origin
            if found is None and not segment.origin.expired():
                logger.warning(
                    "a KV cache of %d bytes was moved to shared memory, but tensors that were not "
                    "wrapped still use the old memory: neither side sees what the other writes",
                    segment.nbytes,
                )

    def open(self, descriptor: TensorDescriptor) -> Opened:
        """Map the segment that a tensor of another process, or of this one, lies in.

        Raises:
            PeerGone: the segment is not there: its owner has ended or let go of it.
            RemoteProtocolError: it is not what the descriptor says.
            CapacityError: it cannot be mapped.
        """
        share = descriptor.share
        if not isinstance(share, CpuShare):
            raise LocalProtocolError(f"expected a CPU share, got {type(share).__name__}")
        return self._opened.open(share.segment, descriptor, lambda: _attach(share))

    def _find(self, origin: torch.UntypedStorage) -> tuple[_Segment, torch.UntypedStorage] | None:
        """The segment that ``origin`` lies in or was moved to, and a storage in it."""
        for dead in [ref for ref in self._segments if ref.expired()]:
            del self._segments[dead]
        segment = self._segments.get(StorageWeakRef(origin))
        storage = segment.storage() if segment is not None else None
        return (segment, storage) if segment is not None and storage is not None else None

    def _make(
        self, origin: torch.UntypedStorage, undo: ExitStack
    ) -> tuple[_Segment, torch.UntypedStorage]:
        """A new segment with the bytes of ``origin``."""
        arena = Arena.create(origin.nbytes())
        buffer = _buffer(arena)
        segment = _Segment(origin, arena, buffer)
        undo.callback(self._drop, segment)
        self._segments[segment.origin] = segment
        torch.frombuffer(buffer, dtype=torch.uint8).copy_(_bytes(origin))
        return segment, _storage(buffer)

    def _drop(self, segment: _Segment) -> None:
        for ref in [ref for ref, found in self._segments.items() if found is segment]:
            del self._segments[ref]
        try:
            segment.close()
        except OSError:
            logger.debug("segment %s was not removed", segment.name, exc_info=True)


class _Segment:
    """Shared memory with the bytes of a storage; it goes when nothing lies in it any more.

    Attributes:
        origin: the storage whose bytes it took over.
        close: removes the segment's name at once.
    """

    def __init__(self, origin: torch.UntypedStorage, arena: Arena, buffer: Buffer) -> None:
        self.name = arena.name
        self.nbytes = arena.nbytes
        self.origin = StorageWeakRef(origin)
        self.close = weakref.finalize(buffer, arena.close)
        self._buffer = weakref.ref(buffer)

    def storage(self) -> torch.UntypedStorage | None:
        """Its bytes; None when it is gone. While a storage lives, so does the segment."""
        buffer = self._buffer()
        return _storage(buffer) if buffer is not None else None


def _move(tensor: torch.Tensor, storage: torch.UntypedStorage, undo: ExitStack) -> None:
    """Let the tensor lie in ``storage`` as it lay in its own."""
    origin = tensor.untyped_storage()
    # A view that autograd knows of holds the tensor it was made from, and so the old memory.
    for each in (tensor, tensor._base):
        if each is not None and each.untyped_storage().data_ptr() == origin.data_ptr():
            undo.callback(_point, each, origin)
            _point(each, storage)


def _point(tensor: torch.Tensor, storage: torch.UntypedStorage) -> None:
    with torch.inference_mode(tensor.is_inference()):
        tensor.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def _buffer(arena: Arena) -> Buffer:
    """The arena's bytes, as an object that tensors on them keep, and that can be waited for."""
    return (ctypes.c_ubyte * arena.nbytes).from_buffer(arena.view(0, arena.nbytes))


def _storage(buffer: Buffer) -> torch.UntypedStorage:
    return torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def _attach(share: CpuShare) -> Mapped:
    if share.nbytes == 0:
        return torch.empty(0, dtype=torch.uint8), lambda: None
    arena = Arena.attach(share.segment, share.nbytes)
    return torch.frombuffer(_buffer(arena), dtype=torch.uint8), arena.close


def _check_dense(tensor: torch.Tensor) -> None:
    if tensor.layout is not torch.strided:
        raise LayoutError(f"expected a strided tensor, got {tensor.layout}")
    dense = 1
    for stride, extent in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if extent > 1 and stride != dense:
            raise LayoutError(
                "expected a tensor that is dense in some order of its axes, got "
                f"shape {tuple(tensor.shape)} stride {tensor.stride()}"
            )
        dense *= extent
