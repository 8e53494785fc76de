"""For whom a request is, as the cache server names it. Pure."""

from __future__ import annotations

from blake3 import blake3

from lmcache_kernels.transfer.messages import is_tenant


def tenant_of(salt: str) -> str:
    """The salt itself if a tenant can have that name, otherwise a hash of it, in hex."""
    if is_tenant(salt):
        return salt
    return blake3(salt.encode("utf-8", "surrogatepass")).hexdigest()


def salt_for_digests(salt: str) -> str:
    """What to name chunks by: of other salts something else, and always text that can be encoded."""
    tenant = tenant_of(salt)
    return salt if tenant == salt else f"/{tenant}"  # no salt that stays as it is looks so
