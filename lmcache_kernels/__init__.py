"""lmcache-kernels: moves an LLM's paged KV cache, whatever its layout.

Importing this package is free: no torch, no CUDA context, no GPU needed. The names below load what
they need when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .errors import KVTransferError, LayoutError
from .plane import CacheGroup, Plane

if TYPE_CHECKING:
    from .copying import copy_blocks
    from .views import blocked_group_of, group_of, opaque_group_of, plane_of

__version__ = "0.1.0"

__all__ = [
    "CacheGroup",
    "KVTransferError",
    "LayoutError",
    "Plane",
    "__version__",
    "blocked_group_of",
    "copy_blocks",
    "group_of",
    "opaque_group_of",
    "plane_of",
]

_LAZY = {
    "blocked_group_of": "views",
    "copy_blocks": "copying",
    "group_of": "views",
    "opaque_group_of": "views",
    "plane_of": "views",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(f".{_LAZY[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
