"""Who can reach an address. Pure."""

from __future__ import annotations

import ipaddress


def is_loopback(host: str) -> bool:
    """Can only this machine reach it? Of names, that is said of ``localhost`` alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
