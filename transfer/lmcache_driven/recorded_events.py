"""Points in what an engine has queued on its device, for another process to wait for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from lmcache_kernels.errors import ConfigError, KVTransferError

if TYPE_CHECKING:
    import torch


class RecordedEvents(Protocol):
    def record(self) -> bytes:
        """The handle of an event behind everything that the caller has queued; empty: no need."""
        ...

    def acknowledge(self, handle: bytes) -> None:
        """Nobody will wait for the event any more."""
        ...


class NoEvents:
    """Of a CPU: what a caller has done is done."""

    def record(self) -> bytes:
        return b""

    def acknowledge(self, handle: bytes) -> None:
        pass


class CudaEvents:
    """Of a GPU.

    Args:
        device: as torch spells it, with its number.

    Raises:
        ConfigError: events cannot be shared here.
    """

    def __init__(self, device: str) -> None:
        import torch

        from lmcache_kernels.transfer.sharing.ipc_events import ExportedEvents

        self._device = torch.device(device)
        self._exported = ExportedEvents()
        try:
            self.acknowledge(self.record())
        except (RuntimeError, KVTransferError) as error:
            raise ConfigError(
                f"{device}: events cannot be shared with other processes ({error}); use the "
                "transfer mode engine_driven"
            ) from error

    def record(self) -> bytes:
        import torch

        event: torch.cuda.Event = torch.cuda.Event(interprocess=True)
        event.record(torch.cuda.current_stream(self._device))
        return self._exported.export(event)

    def acknowledge(self, handle: bytes) -> None:
        self._exported.acknowledge(handle)


def recorded_events(device: str) -> RecordedEvents:
    """The events of a device.

    Raises:
        ConfigError: they cannot be shared here.
    """
    return NoEvents() if device == "cpu" else CudaEvents(device)
