"""Measures the paths of this machine's GPUs for the planner and keeps what it found."""

from __future__ import annotations

import time

import typer

from lmcache_kernels.errors import ConfigError


def run_calibration() -> int:
    """Calibrate every GPU; 0.

    Raises:
        ConfigError: no GPU, or no place to keep the result.
        TransferFailed: a GPU does not finish.
    """
    import torch

    count = torch.cuda.device_count()
    if not count:
        raise ConfigError("calibrate: torch sees no GPU, and copies in host memory have one path")
    from lmcache_kernels.transfer.moving.calibration import calibrate, keep

    for index in range(count):
        device = f"cuda:{index}"
        typer.echo(f"{device} ({torch.cuda.get_device_name(index)}): measuring ...")
        start = time.perf_counter()
        found = calibrate(device)
        seconds = time.perf_counter() - start
        try:
            path = keep(found)
        except OSError as error:
            raise ConfigError(f"calibration: cannot be kept: {error}") from error
        typer.echo(f"{device}: {len(found.samples)} kinds of transfer in {seconds:.0f} s, {path}")
    return 0
