"""What a worker or scheduler can ask of a cache, and what it is answered.

One struct for each request and each reply; nothing else ever crosses a socket or reaches a
:class:`~lmcache_kernels.transfer.serving.service.CacheService`. Every request gets exactly one reply: the
type :data:`REPLY_OF` names for it, or :class:`ErrorReply`. Pure: no sockets, no clocks.

Chunks are named by a *shard id* (32 bytes: which slice of the model's KV cache, in which canonical
form) and a *digest* (32 bytes: which tokens after which prefix). ``digests`` fields hold ``n``
digests packed one after the other, in prefix order.
"""

# ruff: noqa: I001 - names that are handed on, one a line

from __future__ import annotations

from typing import TypeAlias

from .base import (
    DIGEST_BYTES as DIGEST_BYTES,
    ERROR_CODES as ERROR_CODES,
    MAX_CHUNKS as MAX_CHUNKS,
    MAX_NAME as MAX_NAME,
    MAX_PART as MAX_PART,
    MAX_PIN_SECONDS as MAX_PIN_SECONDS,
    MAX_TENANT as MAX_TENANT,
    MAX_TRANSFERS as MAX_TRANSFERS,
    PROTOCOL_VERSION as PROTOCOL_VERSION,
    ErrorReply as ErrorReply,
    Reply as Reply,
    Request as Request,
    is_tenant as is_tenant,
    split_digests as split_digests,
)
from .connection import (
    Done as Done,
    Hello as Hello,
    Ping as Ping,
    Pong as Pong,
    Register as Register,
    RegisterCache as RegisterCache,
    Registered as Registered,
    Unregister as Unregister,
    Welcome as Welcome,
)
from .finding import (
    Clear as Clear,
    Cleared as Cleared,
    EndSession as EndSession,
    Found as Found,
    Lookup as Lookup,
    Pin as Pin,
    Unpin as Unpin,
)
from .transfers import (
    AbortStore as AbortStore,
    CommitRetrieve as CommitRetrieve,
    CommitStore as CommitStore,
    Copied as Copied,
    GetPart as GetPart,
    LoadBlocks as LoadBlocks,
    Loaded as Loaded,
    LoadSlots as LoadSlots,
    Part as Part,
    PrepareRetrieve as PrepareRetrieve,
    PrepareStore as PrepareStore,
    PutPart as PutPart,
    Settle as Settle,
    StoreBlocks as StoreBlocks,
    StoreSlots as StoreSlots,
)

AnyRequest: TypeAlias = (
    Hello | Ping | Register | Unregister | Lookup | EndSession | Pin | Unpin | Clear
    | PrepareStore | CommitStore | AbortStore | PrepareRetrieve | CommitRetrieve
    | RegisterCache | StoreBlocks | LoadBlocks | Settle | PutPart | GetPart
)  # fmt: skip
AnyReply: TypeAlias = (
    Welcome | Pong | Registered | Done | Found | Cleared | StoreSlots | LoadSlots
    | Copied | Loaded | Part | ErrorReply
)  # fmt: skip

REPLY_OF: dict[type[Request], type[Reply]] = {
    Hello: Welcome,
    Ping: Pong,
    Register: Registered,
    Unregister: Done,
    Lookup: Found,
    EndSession: Done,
    Pin: Found,
    Unpin: Done,
    Clear: Cleared,
    PrepareStore: StoreSlots,
    CommitStore: Done,
    AbortStore: Done,
    PrepareRetrieve: LoadSlots,
    CommitRetrieve: Done,
    RegisterCache: Registered,
    StoreBlocks: Copied,
    LoadBlocks: Loaded,
    Settle: Done,
    PutPart: Done,
    GetPart: Part,
}
