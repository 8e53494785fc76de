"""Hand all the tensors of a KV cache to another process at once, or none of them."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from typing import TYPE_CHECKING

from lmcache_kernels.errors import LayoutError
from lmcache_kernels.transfer.arguments import check_named

from .devices import backend_for, backend_named

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import torch

    from .descriptors import TensorDescriptor
    from .opening import Opened

logger = logging.getLogger(__name__)


class WrappedCaches:
    """Tensors that other processes may open, kept alive until :meth:`close`.

    Attributes:
        descriptors: what to send, in the order of the tensors.
    """

    def __init__(
        self, tensors: Iterable[torch.Tensor], descriptors: Iterable[TensorDescriptor]
    ) -> None:
        self.descriptors = list(descriptors)
        self._tensors = list(tensors)

    def close(self) -> None:
        """Let go of the tensors; peers must no longer use them. Idempotent.

        What the engine still has stays in shared memory and is found there when wrapped again.
        """
        self._tensors.clear()


def wrap_kv_caches(kv_caches: Mapping[str, torch.Tensor]) -> WrappedCaches:
    """Make every tensor of a KV cache one that other processes can open.

    CPU tensors move into shared memory while nobody may write to them; those in shared memory
    already stay. Whatever goes wrong, with any of them, leaves all as they were.

    Args:
        kv_caches: layer name to tensor.

    Raises:
        LayoutError: a tensor that its device cannot share, or of an unknown device type.
        CapacityError: not enough shared memory.
        ConfigError: memory or a choice of backend that cannot work.
    """
    check_named("kv_caches", kv_caches)
    descriptors: list[TensorDescriptor] = []
    with ExitStack() as batch:
        for name, tensor in kv_caches.items():
            _check(tensor, f"kv_caches[{name!r}]")
            if logger.isEnabledFor(logging.DEBUG):
                logger.debug(
                    "wrapping KV cache %d: %s, shape %s, %s on %s",
                    *(len(descriptors), name, tuple(tensor.shape), tensor.dtype, tensor.device),
                )
            wrapped = backend_for(tensor.device.type).wrap(tensor)
            descriptors.append(batch.enter_context(wrapped))
    logger.info("wrapped %d KV caches", len(descriptors))
    return WrappedCaches(kv_caches.values(), descriptors)


def wrap_one_kv_cache(tensor: torch.Tensor) -> TensorDescriptor:
    """Make one tensor such that other processes can open it; the caller keeps it alive.

    Raises:
        LayoutError, CapacityError, ConfigError: as :func:`wrap_kv_caches`.
    """
    _check(tensor, "KV cache")
    with backend_for(tensor.device.type).wrap(tensor) as descriptor:
        return descriptor


class OpenedCaches:
    """Tensors of another process; none may be used after :meth:`close`.

    Attributes:
        opened: one for each descriptor, in order.
    """

    def __init__(self, opened: list[Opened], closing: ExitStack) -> None:
        self.opened = opened
        self._closing = closing

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [one.to_tensor() for one in self.opened]

    def close(self) -> None:
        """Unmap everything. Idempotent."""
        self._closing.close()


def open_kv_caches(descriptors: Iterable[TensorDescriptor]) -> OpenedCaches:
    """Open what another process has wrapped: all of it, or nothing.

    Raises:
        PeerGone: the owner has ended, or no longer has the memory.
        RemoteProtocolError: the memory is not what a descriptor says.
        ConfigError: a GPU or a backend that this process does not have.
        CapacityError: memory that cannot be mapped.
    """
    with ExitStack() as closing:
        opened = []
        for descriptor in descriptors:
            one = backend_named(descriptor.backend).open(descriptor)
            closing.callback(one.close)
            opened.append(one)
        return OpenedCaches(opened, closing.pop_all())


def _check(tensor: object, what: str) -> None:
    import torch

    if not isinstance(tensor, torch.Tensor):
        raise LayoutError(f"{what}: expected a torch.Tensor, got {type(tensor).__name__}")
