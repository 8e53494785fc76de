"""The other side of sharing: an owner's allocation mapped here once, and the tensors inside it."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeAlias, TypeVar

import torch

from lmcache_kernels.errors import Closed, RemoteProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable

    from .descriptors import TensorDescriptor

Mapped: TypeAlias = "tuple[torch.Tensor, Callable[[], None]]"
"""An allocation as a tensor of its bytes, and how to unmap it."""

K = TypeVar("K")


class Opened:
    """A tensor of another process, usable here until :meth:`close`.

    Args:
        descriptor: what it is.
        whole: the allocation's bytes, one-dimensional uint8.
        release: called once, by :meth:`close`.

    Raises:
        RemoteProtocolError: the allocation is smaller than the descriptor says.
    """

    def __init__(
        self, descriptor: TensorDescriptor, whole: torch.Tensor, release: Callable[[], None]
    ) -> None:
        if whole.numel() < descriptor.share.nbytes:
            raise RemoteProtocolError(
                f"shared memory: expected {descriptor.share.nbytes} bytes, got {whole.numel()}"
            )
        self.descriptor = descriptor
        self._release = release
        dtype = getattr(torch, descriptor.dtype)
        self._tensor: torch.Tensor | None = torch.empty(0, dtype=dtype, device=whole.device).set_(
            whole.untyped_storage(),
            descriptor.share.offset // descriptor.itemsize,
            descriptor.shape,
            descriptor.strides,
        )

    def to_tensor(self) -> torch.Tensor:
        """The tensor, with the owner's shape, strides and bytes; not to be used once this is closed.

        Raises:
            Closed: after :meth:`close`.
        """
        if self._tensor is None:
            raise Closed("the shared tensor is closed")
        return self._tensor

    @property
    def address(self) -> int:
        """Of element 0, in this process."""
        return self.to_tensor().data_ptr()

    @property
    def device(self) -> str:
        """Where the address is valid, as torch spells it."""
        return str(self.to_tensor().device)

    def close(self) -> None:
        """Give the memory back to its owner; whoever still copies from or to it must be done.

        Idempotent.
        """
        if self._tensor is not None:
            self._tensor = None
            self._release()


@dataclass
class _User:
    whole: torch.Tensor
    unmap: Callable[[], None]
    count: int = 0


class OpenOnce(Generic[K]):
    """Maps each allocation once, however many tensors lie in it, until the last one is closed.

    Safe for threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # held while an allocation is mapped or unmapped
        self._users: dict[K, _User] = {}

    def open(self, key: K, descriptor: TensorDescriptor, mapping: Callable[[], Mapped]) -> Opened:
        """The tensor; ``mapping`` maps the allocation ``key`` if nobody here has it yet."""
        with self._lock:
            user = self._users.get(key)
            if user is None:
                user = self._users[key] = _User(*mapping())
            user.count += 1
        try:
            return Opened(descriptor, user.whole, lambda: self._close(key))
        except BaseException:
            self._close(key)
            raise

    def _close(self, key: K) -> None:
        with self._lock:
            user = self._users[key]
            user.count -= 1
            if user.count == 0:
                del self._users[key]
                user.unmap()

    def __len__(self) -> int:
        """Allocations that are mapped."""
        return len(self._users)
