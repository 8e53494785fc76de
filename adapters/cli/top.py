"""``lmcache-kernels top``: what a server does, in a terminal, until it is interrupted."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.live import Live

from lmcache_kernels.errors import ConfigError, PeerGone

from .polling import StatusPage
from .top_frame import Frame

if TYPE_CHECKING:
    from .polling import Status


def run_top(
    url: str,
    *,
    interval: float = 2.0,
    once: bool = False,
    token_file: str = "",
    console: Console | None = None,
    stop: threading.Event | None = None,
) -> int:
    """Show it; the exit status.

    Args:
        url: of the server's HTTP side.
        interval: seconds between looks.
        once: print one picture, with averages since the server's start, instead.
        token_file: with the token that a server wants which others can reach.
        console: where to; standard output if not given.
        stop: ends it when set.

    Raises:
        ConfigError: a URL or file that cannot be.
    """
    page = StatusPage(url, _token(token_file))
    console = console or Console()
    if once:
        try:
            console.print(Frame(page.url, page.read()))
        except PeerGone as error:
            sys.stderr.write(f"lmcache-kernels: {error}\n")
            return 1
        return 0
    look = _Look(page)
    stop = stop or threading.Event()
    with Live(console=console, screen=console.is_terminal, auto_refresh=False) as live:
        try:
            while not stop.is_set():
                live.update(look.frame(console.height), refresh=True)
                stop.wait(interval)
        except KeyboardInterrupt:
            pass
    return 0


class _Look:
    """One look after the other at a page: each picture compares with the last one."""

    def __init__(self, page: StatusPage) -> None:
        self._page = page
        self._now: Status | None = None
        self._before: Status | None = None

    def frame(self, height: int) -> Frame:
        away = None
        try:
            now = self._page.read()
        except PeerGone as error:
            away = str(error).removeprefix(f"{self._page.url}: ")
        else:
            known = self._now is not None and self._now.incarnation == now.incarnation
            self._before = self._now if known else None
            self._now = now
        return Frame(self._page.url, self._now, self._before, away, height)


def _token(path: str) -> str | None:
    if not path:
        return None
    try:
        return Path(path).read_text().strip()
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"--token-file: {error}") from error
