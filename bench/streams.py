"""Streams of a device; on the host, which has none, work is done when it is called for."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch

from lmcache_kernels.transfer.moving.device import EventCompletion
from lmcache_kernels.transfer.moving.moves import Over

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager

    from lmcache_kernels.transfer.moving.moves import Completion


def new_stream(device: str) -> torch.cuda.Stream | None:
    """One of the default priority; None on the host."""
    return None if device == "cpu" else torch.cuda.Stream(device)


def on(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    """Make the stream the current one."""
    return nullcontext() if stream is None else torch.cuda.stream(stream)


@contextmanager
def forked(streams: Sequence[torch.cuda.Stream | None]) -> Iterator[None]:
    """What these streams get meanwhile is, to the current stream, as if it were its own work."""
    others = [stream for stream in streams if stream is not None]
    for stream in others:
        stream.wait_stream(torch.cuda.current_stream())
    yield
    for stream in others:
        torch.cuda.current_stream().wait_stream(stream)


def point_in(stream: torch.cuda.Stream | None) -> Completion:
    """What the stream has now; over when all of that is."""
    if stream is None:
        return Over()
    event = torch.cuda.Event()
    event.record(stream)
    return EventCompletion(event)
