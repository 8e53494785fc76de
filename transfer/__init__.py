"""The transfer API: move blocks of a paged KV cache into a store and back, or to another process.

It needs torch and no engine, no server and no socket. Importing it loads nothing; the names below
load what they need when they are first used. See ``docs/api.md``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .context_factory import create_transfer_context
    from .embedded import EmbeddedCache
    from .engine_driven.context import EngineDrivenContext
    from .handover.peer_copy import PeerCopy
    from .handover.peer_target import PeerTarget
    from .keys import ChunkChain, root_digest, shard_id
    from .observer import Observer, TransferEvent
    from .sharing.wrapping import open_kv_caches, wrap_kv_caches

__all__ = [
    "ChunkChain",
    "EmbeddedCache",
    "EngineDrivenContext",
    "Observer",
    "PeerCopy",
    "PeerTarget",
    "TransferEvent",
    "create_transfer_context",
    "open_kv_caches",
    "root_digest",
    "shard_id",
    "wrap_kv_caches",
]

_LAZY = {
    "ChunkChain": "keys",
    "EmbeddedCache": "embedded",
    "EngineDrivenContext": "engine_driven.context",
    "Observer": "observer",
    "PeerCopy": "handover.peer_copy",
    "PeerTarget": "handover.peer_target",
    "TransferEvent": "observer",
    "create_transfer_context": "context_factory",
    "open_kv_caches": "sharing.wrapping",
    "root_digest": "keys",
    "shard_id": "keys",
    "wrap_kv_caches": "sharing.wrapping",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(f".{_LAZY[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
