"""From the URL of a tier to the tier."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmcache_kernels.errors import ConfigError

from .files import FileTier
from .mooncake import MooncakeTier
from .settings import TierUrl
from .valkey import ValkeyTier

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from lmcache_kernels.transfer.tiering.tier import Tier

SCHEMES: Mapping[str, Callable[[TierUrl], Tier]] = {
    "file": FileTier.from_url,
    "valkey": ValkeyTier.from_url,
    "valkeys": ValkeyTier.from_url,
    "redis": ValkeyTier.from_url,
    "rediss": ValkeyTier.from_url,
    "mooncake": MooncakeTier.from_url,
}
"""What makes the tier of a URL, by its scheme."""


def open_tier(url: str) -> Tier:
    """The tier of this URL; ``docs/tiers.md`` lists them with their options.

    Nothing is opened, made or reached yet: a tier does that when it is attached and used, and one
    that is away then is :class:`~lmcache_kernels.errors.TierUnavailable` until it is there.

    Raises:
        ConfigError: an unknown scheme or option, a value that an option cannot have, or a package
            that is not installed; the message shows no password.
    """
    parsed = TierUrl.parse(url)
    make = SCHEMES.get(parsed.scheme)
    if make is None:
        known = ", ".join(f"{scheme}://" for scheme in SCHEMES)
        raise ConfigError(f"tier: expected one of {known}, got {parsed.scheme}://")
    return make(parsed)
