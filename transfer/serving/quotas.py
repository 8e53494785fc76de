"""How many bytes each tenant may use. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from lmcache_kernels.errors import ConfigError
from lmcache_kernels.transfer.messages import MAX_TENANT, is_tenant

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class Quotas:
    """Bytes of slots, headers included; 0: nothing is stored.

    Attributes:
        tenants: by name; "" are those who name none.
        default: of every other tenant but those who name none; None: no limit.

    Raises:
        ConfigError: a name that cannot be a tenant's, or a quota below 0.
    """

    tenants: Mapping[str, int] = field(default_factory=dict)
    default: int | None = None

    def __post_init__(self) -> None:
        for tenant, nbytes in self.tenants.items():
            if not is_tenant(tenant):
                raise ConfigError(
                    f"quota: expected a tenant of at most {MAX_TENANT} printable characters without "
                    f"@ / \\, got {tenant[: MAX_TENANT + 1]!r}"
                )
            _check(f"quota of {tenant!r}", nbytes)
        if self.default is not None:
            _check("default quota", self.default)

    def of(self, tenant: str) -> int | None:
        """None: no limit."""
        return self.tenants.get(tenant, self.default if tenant else None)

    def changed(self, tenant: str | None, nbytes: int | None) -> Quotas:
        """With another quota for ``tenant``, or the default if None. ``nbytes`` None: none of its own.

        Raises:
            ConfigError: see :class:`Quotas`.
        """
        if tenant is None:
            return replace(self, default=nbytes)
        others = {name: quota for name, quota in self.tenants.items() if name != tenant}
        return replace(self, tenants=others if nbytes is None else others | {tenant: nbytes})


def _check(what: str, nbytes: int) -> None:
    if isinstance(nbytes, bool) or not isinstance(nbytes, int) or nbytes < 0:
        raise ConfigError(f"{what}: expected >= 0 bytes, got {nbytes!r}")
