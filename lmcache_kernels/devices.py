"""What a copy has to know about devices before it runs on one."""

from __future__ import annotations

import os
from functools import cache

from .errors import LayoutError


def interpreting() -> bool:
    """True when Triton runs its kernels on the CPU (``TRITON_INTERPRET=1``)."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@cache
def check_present(device: str) -> None:
    """Raise LayoutError unless this process has the CUDA device."""
    import torch

    kind, _, index = device.partition(":")
    if kind != "cuda" or int(index) >= torch.cuda.device_count():
        raise LayoutError(
            f"plane.device: {device} is not here; torch finds {torch.cuda.device_count()} CUDA devices"
        )


@cache
def enable_peer_access(device: str, other: str) -> None:
    """Let kernels on GPU ``device`` read and write the memory of GPU ``other`` of this process.

    Raises:
        LayoutError: the two are not linked so.
    """
    import torch

    check_present(other)
    if not torch.cuda.can_device_access_peer(torch.device(device), torch.device(other)):
        raise LayoutError(
            f"planes lie on different devices: {device} cannot reach the memory of {other}; "
            "stage one of them in host memory"
        )
    # torch enables access when it first copies between two devices, and remembers that it did.
    torch.empty(1, device=other).copy_(torch.empty(1, device=device))
