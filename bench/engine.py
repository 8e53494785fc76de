"""The transfer engine: how full the link is, what decoding pays for it, and what the host pays.

Parts are chosen by title: ``--only link``, ``two-way``, ``sustained``, ``decode``, ``gemm``, ``latency`` or
``submit``, or anything else that a title has in it.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from . import decode_loop, latency, layers, link, submit_cost, sustained, two_way
from .rig import Rig
from .timing import DeviceClock

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from .options import Options
    from .results import Row

PARTS: dict[str, Callable[[Rig], list[Row]]] = {
    link.PART: link.run,
    two_way.PART: two_way.run,
    sustained.PART: sustained.run,
    **{part: partial(decode_loop.run, part) for part in decode_loop.PARTS},
    layers.PART: layers.run,
    latency.PART: latency.run,
    submit_cost.PART: submit_cost.run,
}


def run(
    options: Options, device: str = "cuda:0", mover: Mapping[str, Any] | None = None
) -> list[Row]:
    """Measure every part, printing each row as it is done.

    Args:
        mover: arguments of the library's mover, to be tuned. They go to the parts that make one
            themselves; of them, a transfer context takes ``max_programs`` alone.
    """
    settings = dict(mover or {})
    if options.max_programs is not None:
        settings["max_programs"] = options.max_programs
    rows: list[Row] = []
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
        rig = Rig(options, device, DeviceClock([device]), settings)
        for part in PARTS.values():
            rows += part(rig)
    return rows
