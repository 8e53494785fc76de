"""Memory near a GPU: which NUMA node is its own, and a preference for that node."""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import re
from pathlib import Path

from lmcache_kernels.errors import ConfigError

logger = logging.getLogger(__name__)

NODES = Path("/sys/devices/system/node")
PCI_DEVICES = Path("/sys/bus/pci/devices")

_PCI_ADDRESS = re.compile(r"(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}:[0-9a-f]{2}\.[0-7])")
_MBIND = {"x86_64": 237, "aarch64": 235}  # numbers of the system call
_MPOL_PREFERRED = 1
_LONG_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)


def nodes() -> list[int]:
    """Numbers of this machine's nodes; none where the kernel knows of none."""
    found = (re.fullmatch(r"node(\d+)", path.name) for path in NODES.glob("node*"))
    return sorted(int(match[1]) for match in found if match)


def node_of(pci_address: str) -> int | None:
    """The node that a device is attached to; None if there is only one, or the machine does not say.

    Args:
        pci_address: such as ``0000:3b:00.0``; with a domain of eight digits as nvidia-smi prints it,
            or without one.

    Raises:
        ConfigError: not an address.
    """
    match = _PCI_ADDRESS.fullmatch(pci_address.lower())
    if match is None:
        raise ConfigError(f"PCI address: expected one like 0000:3b:00.0, got {pci_address[:40]!r}")
    device = PCI_DEVICES / f"{int(match[1] or '0', 16):04x}:{match[2]}"
    try:
        node = int((device / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    known = nodes()
    return node if node in known and len(known) > 1 else None


def check_node(node: int) -> None:
    """Raise ConfigError unless the machine has the node."""
    known = nodes() or [0]
    if node not in known:
        raise ConfigError(f"numa_node: expected one of {known}, got {node}")


def prefer_node(address: int, nbytes: int, node: int) -> None:
    """Pages of a mapping that are not there yet come from ``node`` while it has some.

    A preference: where the kernel refuses it (containers may), a warning says so.
    """
    if len(nodes()) < 2:
        return
    number = _MBIND.get(platform.machine())
    if number is None:
        logger.warning("no NUMA placement: unknown processor type %s", platform.machine())
        return
    mask = (ctypes.c_ulong * (node // _LONG_BITS + 1))()
    mask[node // _LONG_BITS] = 1 << node % _LONG_BITS
    library = ctypes.CDLL(None, use_errno=True)
    refused = library.syscall(
        ctypes.c_long(number),
        ctypes.c_void_p(address),
        ctypes.c_ulong(nbytes),
        ctypes.c_int(_MPOL_PREFERRED),
        mask,
        ctypes.c_ulong(len(mask) * _LONG_BITS + 1),  # the kernel reads one bit less
        ctypes.c_uint(0),
    )
    if refused:
        reason = os.strerror(ctypes.get_errno())
        logger.warning(
            "no NUMA placement on node %d: %s (docker: --cap-add SYS_NICE)", node, reason
        )
