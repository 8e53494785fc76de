"""Who copies a worker's chunks: the worker itself, or the server for it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from lmcache_kernels.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

MODE_VARIABLE = "LMCACHE_MP_TRANSFER_MODE"
MODES = ("engine_driven", "lmcache_driven", "auto")


def transfer_mode(mode: str | None, environment: Mapping[str, str] = os.environ) -> str:
    """``engine_driven`` or ``lmcache_driven``, the former for ``auto``.

    Args:
        mode: as configured, in any case; None: what the environment variable
            ``LMCACHE_MP_TRANSFER_MODE`` says, or auto. It is not asked otherwise, also for auto.

    Raises:
        ConfigError: no such mode.
    """
    chosen = environment.get(MODE_VARIABLE, "auto") if mode is None else mode
    if not isinstance(chosen, str) or chosen.lower() not in MODES:
        raise ConfigError(f"transfer mode: expected one of {', '.join(MODES)}, got {chosen!r}")
    return MODES[0] if chosen.lower() == "auto" else chosen.lower()
