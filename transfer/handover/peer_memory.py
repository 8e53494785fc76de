"""Another process's cache, mapped where the kernels of one GPU of this process reach it.

CUDA maps an allocation into the address space of the GPU that is current when its handle is opened,
whichever GPU the memory lies on, and lets the one reach the other (``cuIpcOpenMemHandle``,
CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS). So the GPU that copies opens the handles, and in this process
the addresses are its own. It makes no context on the other GPU and need not see it: two engines of
which each sees one GPU only reach each other.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import cache
from typing import TYPE_CHECKING

import msgspec
import torch

from lmcache_kernels.errors import ConfigError, LayoutError
from lmcache_kernels.transfer.sharing.cuda_driver import CudaCallFailed, CudaDriver
from lmcache_kernels.transfer.sharing.cuda_share import CudaSharing
from lmcache_kernels.transfer.sharing.descriptors import CudaShare
from lmcache_kernels.transfer.sharing.wrapping import OpenedCaches, open_kv_caches

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lmcache_kernels.transfer.sharing.descriptors import TensorDescriptor


def open_for(descriptors: Sequence[TensorDescriptor], device: str) -> OpenedCaches:
    """Open what another process has wrapped, for copies that ``device`` makes: all or nothing.

    Args:
        device: of this process, as torch spells it. The tensors say that they lie on it, also where
            their memory is another GPU's.

    Raises:
        LayoutError: memory of another kind of device.
        ConfigError: a GPU that ``device`` does not reach.
        PeerGone, RemoteProtocolError, CapacityError: see
            :func:`~lmcache_kernels.transfer.sharing.wrapping.open_kv_caches`.
    """
    kind, _, number = device.partition(":")
    for descriptor in descriptors:
        if descriptor.backend != kind:
            raise LayoutError(
                f"the peer's cache: expected memory of {kind} as here, got {descriptor.backend}"
            )
    if kind != "cuda":
        return open_kv_caches(descriptors)
    own = next(uuid for uuid, ordinal in _driver().ordinals().items() if ordinal == int(number))
    with ExitStack() as closing:
        opened = []
        for descriptor in descriptors:
            one = _sharing().open(_as_of(descriptor, own))
            closing.callback(one.close)
            opened.append(one)
        return OpenedCaches(opened, closing.pop_all())


def _as_of(descriptor: TensorDescriptor, device: str) -> TensorDescriptor:
    share = descriptor.share
    if not isinstance(share, CudaShare):
        raise LayoutError(f"the peer's cache: expected CUDA memory, got {type(share).__name__}")
    share = msgspec.structs.replace(share, device=device)
    return msgspec.structs.replace(descriptor, share=share)


class _PeerDriver(CudaDriver):
    """Opens memory of any GPU for the one that is asked."""

    def open(self, ordinal: int, handle: bytes) -> int:
        try:
            return super().open(ordinal, handle)
        except CudaCallFailed as error:
            if "PEER" not in str(error):  # CUDA_ERROR_PEER_ACCESS_UNSUPPORTED, _TOO_MANY_PEERS
                raise
            raise ConfigError(
                f"the peer's cache: cuda:{ordinal} cannot reach the GPU that it lies on ({error}); "
                "hand blocks over through a cache server instead"
            ) from error

    def bytes_at(self, ordinal: int, address: int, nbytes: int) -> torch.Tensor:
        """As the GPU's own, which is asked of nobody: torch would look up where the memory lies and,
        if that is another GPU, copy it here."""
        torch.cuda.init()
        return bytes_at(address, nbytes, torch.device("cuda", ordinal))


def bytes_at(address: int, nbytes: int, device: torch.device) -> torch.Tensor:
    """Memory as a tensor of uint8 on ``device``, which does not own it."""
    storage = torch._C._construct_storage_from_data_pointer(address, device, nbytes)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


@cache
def _driver() -> CudaDriver:
    return _PeerDriver()


@cache
def _sharing() -> CudaSharing:
    return CudaSharing(_driver())
