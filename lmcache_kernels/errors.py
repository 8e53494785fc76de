"""The exceptions of this package: one root, children by whose fault it is.

Every message says what was wrong, what was expected, what was got, and where. Foreign exceptions
are mapped to these at the edge where they appear, with ``raise ... from``.
"""

from __future__ import annotations


class KVTransferError(Exception):
    """Root of every exception this package raises on purpose."""


class LayoutError(KVTransferError, ValueError):
    """Tensors, strides or ids that cannot be described or copied. Raised before a byte moves."""


class ConfigError(KVTransferError, ValueError):
    """A setting that cannot work, named in the message together with what would."""


class ProtocolError(KVTransferError):
    """A message that breaks the protocol."""


class LocalProtocolError(ProtocolError):
    """We used the protocol wrongly: a bug or a misuse on this side."""


class RemoteProtocolError(ProtocolError):
    """The peer sent something that is not the protocol."""


class RemoteError(KVTransferError):
    """The peer answered a well-formed request with an error reply.

    ``code`` is one of the names in :data:`lmcache_kernels.transfer.messages.ERROR_CODES`.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code


class TransportError(KVTransferError):
    """Bytes could not be delivered."""


class PeerGone(TransportError, ConnectionError):
    """The peer is not there: never reached, disconnected, or restarted since the request."""


class TransferTimeout(TransportError, TimeoutError):
    """No answer before the deadline."""


class TierUnavailable(TransportError):
    """A tier below the arena cannot be used at the moment, or at all."""


class Closed(TransportError):
    """The object was closed; it accepts no further work."""


class CapacityError(KVTransferError):
    """Not enough memory, with what was needed and what there is."""


class TransferFailed(KVTransferError):
    """A copy that had started could not be completed; nothing it wrote is offered to anyone."""
