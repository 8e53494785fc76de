"""Tensors in GPU memory: the driver's handle of the allocation, and where in it the tensor lies.

torch cuts tensors out of larger allocations, and a handle is of a whole one; so many tensors have
one handle, and whoever opens them maps it once.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

from lmcache_kernels.errors import ConfigError, LayoutError, LocalProtocolError, PeerGone

from .cuda_driver import CudaCallFailed
from .descriptors import CudaShare, describe
from .opening import OpenOnce

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from .descriptors import TensorDescriptor
    from .opening import Mapped, Opened


class Driver(Protocol):
    """See :class:`~lmcache_kernels.transfer.sharing.cuda_driver.CudaDriver`."""

    def ordinals(self) -> dict[str, int]: ...
    def allocation(self, ordinal: int, address: int) -> tuple[int, int]: ...
    def handle_of(self, ordinal: int, base: int) -> bytes: ...
    def open(self, ordinal: int, handle: bytes) -> int: ...
    def close(self, ordinal: int, address: int) -> None: ...
    def bytes_at(self, ordinal: int, address: int, nbytes: int) -> torch.Tensor: ...


class CudaSharing:
    """The GPU tensors that this process shares, and those of others that it has open.

    Safe for threads.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._lock = threading.Lock()
        self._exported: dict[bytes, int] = {}  # where the allocations with these handles are here
        self._opened: OpenOnce[tuple[int, bytes]] = OpenOnce()

    @cached_property
    def _ordinals(self) -> dict[str, int]:
        return self._driver.ordinals()

    @contextmanager
    def wrap(self, tensor: torch.Tensor) -> Iterator[TensorDescriptor]:
        """Describe ``tensor``; it stays where it is and must live as long as anybody has it open.

        Raises:
            LayoutError: a tensor without plain strides, or of a dtype that cannot be shared.
            ConfigError: memory that was allocated in a way that cannot be shared.
        """
        import torch

        if tensor.layout is not torch.strided:
            raise LayoutError(f"expected a strided tensor, got {tensor.layout}")
        ordinal = tensor.device.index
        device = next(name for name, number in self._ordinals.items() if number == ordinal)
        share = CudaShare(handle=b"", device=device, nbytes=0, offset=0)
        if tensor.numel():
            base, nbytes, handle = self._export(ordinal, tensor.data_ptr())
            offset = tensor.data_ptr() - base
            share = CudaShare(handle=handle, device=device, nbytes=nbytes, offset=offset)
        yield describe(tensor, share)

    def _export(self, ordinal: int, address: int) -> tuple[int, int, bytes]:
        try:
            base, nbytes = self._driver.allocation(ordinal, address)
            handle = self._driver.handle_of(ordinal, base)
        except CudaCallFailed as error:
            raise ConfigError(
                f"GPU memory at {address:#x}: other processes cannot open memory allocated in this "
                f"way ({error}); allocate the KV cache without expandable segments, memory pools "
                "or sleep mode, or use the transfer mode engine_driven"
            ) from error
        with self._lock:
            others = {known: at for known, at in self._exported.items() if at != base}
            self._exported = {**others, handle: base}
        return base, nbytes, handle

    def open(self, descriptor: TensorDescriptor) -> Opened:
        """Map the allocation that a tensor of another process, or of this one, lies in.

        Raises:
            ConfigError: this process does not see the GPU.
            PeerGone: the driver does not know the handle: the owner has ended or freed the memory.
            RemoteProtocolError: the allocation is not what the descriptor says.
        """
        share = descriptor.share
        if not isinstance(share, CudaShare):
            raise LocalProtocolError(f"expected a CUDA share, got {type(share).__name__}")
        ordinal = self._ordinals.get(share.device)
        if ordinal is None:
            raise ConfigError(
                f"GPU {share.device} is not visible to this process, which sees "
                f"{', '.join(self._ordinals) or 'none'}; check CUDA_VISIBLE_DEVICES"
            )
        return self._opened.open(
            (ordinal, share.handle), descriptor, lambda: self._map(ordinal, share)
        )

    def _map(self, ordinal: int, share: CudaShare) -> Mapped:
        if share.nbytes == 0:
            return self._driver.bytes_at(ordinal, 0, 0), lambda: None
        with self._lock:
            own = self._exported.get(share.handle)
        try:
            if own is not None:  # the driver does not open what this process has allocated itself
                return self._own(ordinal, own, share.handle), lambda: None
            address = self._driver.open(ordinal, share.handle)
        except CudaCallFailed as error:
            raise PeerGone(
                f"shared GPU memory cannot be opened; has its owner ended? ({error})"
            ) from error
        try:
            base, nbytes = self._driver.allocation(ordinal, address)
            whole = self._driver.bytes_at(ordinal, address, base + nbytes - address)
        except BaseException:
            self._driver.close(ordinal, address)
            raise
        return whole, lambda: self._driver.close(ordinal, address)

    def _own(self, ordinal: int, address: int, handle: bytes) -> torch.Tensor:
        base, nbytes = self._driver.allocation(ordinal, address)
        if self._driver.handle_of(ordinal, base) != handle:
            raise CudaCallFailed("the memory was freed, and other memory is there now")
        return self._driver.bytes_at(ordinal, base, nbytes)
