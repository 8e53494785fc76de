"""The receiving end of a hand-over: a cache that other processes on this host may write into.

It sends what it offers to a :class:`~lmcache_kernels.transfer.handover.peer_copy.PeerCopy` in each of them.
Offers and signals are bytes; how they travel is up to the two sides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lmcache_kernels.errors import Closed, LayoutError
from lmcache_kernels.transfer.arguments import check_named
from lmcache_kernels.transfer.sharing.descriptors import encode
from lmcache_kernels.transfer.sharing.wrapping import wrap_kv_caches

from .peer_signals import PEER_TIMEOUT, PeerSignals, wait_for

if TYPE_CHECKING:
    from collections.abc import Mapping


class PeerTarget:
    """A cache into which other processes may write blocks.

    Close it when no peer writes any more. Safe for threads.

    Args:
        kv_caches: name to tensor, all on one device; they are kept alive until :meth:`close`. CPU
            tensors move into shared memory, and nobody may write to them meanwhile.

    Attributes:
        offer: bytes for the peers' :class:`PeerCopy`; any number of them may use it.

    Raises:
        LayoutError: no tensors, several devices, or tensors that cannot be shared.
        ConfigError: GPU memory that was allocated in a way that cannot be shared.
        CapacityError: not enough shared memory.
    """

    def __init__(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        check_named("kv_caches", kv_caches)
        devices = {str(getattr(tensor, "device", "no device")) for tensor in kv_caches.values()}
        if len(devices) != 1:
            raise LayoutError(
                f"kv_caches: expected all on one device, got {', '.join(sorted(devices)) or 'none'}"
            )
        self._device = devices.pop()
        self._signals = PeerSignals()
        self._closed = False
        try:
            self._wrapped = wrap_kv_caches(kv_caches)
            self.offer = self._signals.name + encode(self._wrapped.descriptors)
        except BaseException:
            self._signals.close()
            raise

    def ready(self) -> bytes:
        """A signal that what is queued on the current stream now is done: its blocks may be written.

        Raises:
            Closed: after :meth:`close`.
        """
        if self._closed:
            raise Closed("the peer target is closed")
        if self._device == "cpu":
            return self._signals.signal(None)
        event = torch.cuda.Event(interprocess=True)
        event.record(torch.cuda.current_stream(torch.device(self._device)))
        return self._signals.signal(event)

    def wait(self, written: bytes, timeout: float = PEER_TIMEOUT) -> None:
        """Return when the blocks of a :meth:`PeerCopy.copy` are in this cache.

        Args:
            written: the signal that the copy returned.
            timeout: seconds.

        Raises:
            PeerGone: the peer ended or closed before that; what its blocks hold is undefined.
            TransferTimeout: not in that time, and the peer may still write.
            RemoteProtocolError: not such a signal.
            TransferFailed: CUDA reports an error of earlier work.
        """
        wait_for(written, self._device, timeout)

    def close(self) -> None:
        """Tell all peers that this target is gone, and let go of the tensors. Idempotent."""
        self._closed = True
        self._signals.close()
        self._wrapped.close()

    def __enter__(self) -> PeerTarget:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
