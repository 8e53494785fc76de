"""Processes of workers at a server, and what they and the server did in some of that time."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

import msgspec

from bench.workers.process import TIMEOUT, Report, Settings, together
from lmcache_kernels.transfer.asking import ask
from lmcache_kernels.transfer.memory.slot_header import HEADER_BYTES
from lmcache_kernels.transfer.messages import Ping, Pong

if TYPE_CHECKING:
    from lmcache_kernels.adapters.messaging.client import CacheClient
    from lmcache_kernels.adapters.server.spawn import ServerProcess

ROOT = Path(__file__).resolve().parents[2]
PROMPT = "prompt"
PING = "ping of another client"
LEFTOVERS = 19
"""Niceness of those that get what is left of the processors."""

PING_EVERY = 0.02
"""Seconds between pings of a client that does nothing else."""


@dataclass(frozen=True)
class Load:
    """One worker that is timed and others that keep the server busy, as hard as they can.

    On as few processors as a benchmark has, the others would above all keep the server and each other
    from running. So they have what the server and the timed worker leave of the processors.

    Attributes:
        workers: all of them.
        processes: that the others share.
        arena_gb: GiB.
        chunk_bytes, chunks, prompts, families: see :class:`~bench.workers.process.Settings`.
    """

    workers: int = 64
    processes: int = 4
    arena_gb: float = 4.0
    chunk_bytes: int = 64 << 10
    chunks: int = 512
    prompts: int = 1000
    families: int = 50

    @property
    def slot_bytes(self) -> int:
        return HEADER_BYTES + self.chunk_bytes

    def settings(self, url: str) -> list[Settings]:
        """Of the process of the timed worker, and of those of the others."""
        others = self.workers - 1
        bounds = [1 + others * part // self.processes for part in range(self.processes + 1)]
        groups = [(0, 1), *itertools.pairwise(bounds)]
        return [
            Settings(
                url=url,
                first=1 + first,
                workers=end - first,
                chunk_bytes=self.chunk_bytes,
                chunks=self.chunks,
                prompts=self.prompts,
                families=self.families,
                niceness=LEFTOVERS if first else 0,
            )
            for first, end in groups
            if first < end
        ]


@dataclass(frozen=True)
class Window:
    """Some of the time.

    Attributes:
        timed, others: what the one worker and the others saw, warm-up included, but of the calls only
            those answered in that time. The pings count as the timed worker's.
        cpu: seconds of the server's processors.
        memory: bytes of the server's own memory, again and again.
    """

    timed: Report
    others: Report
    cpu: float
    memory: list[int]

    @property
    def total(self) -> Report:
        return together([self.timed, self.others])

    def requests(self) -> list[float]:
        """When each was answered, in order."""
        calls = self.total.calls.items()
        return sorted(end for kind, some in calls if kind not in (PROMPT, PING) for end, _ in some)

    def per_request(self, parts: int = 10) -> list[float]:
        """Seconds a request, in each of so many parts of the time."""
        ends = self.requests()
        width = (ends[-1] - ends[0]) / parts
        counts = [0] * parts
        for end in ends:
            counts[min(parts - 1, int((end - ends[0]) / width))] += 1
        return [width / count for count in counts if count]


def watch(
    load: Load, server: ServerProcess, client: CacheClient, *, warm_up: float, seconds: float
) -> Window:
    """Put a load on a server, and look at so much of the time after the warm-up."""
    with ExitStack() as running:
        processes = [running.enter_context(Workers(one)) for one in load.settings(server.url)]
        for one in processes:
            one.go()
        _ping_until(time.monotonic() + warm_up, client)
        began, cpu = time.monotonic(), cpu_seconds(server.pid)
        memory, pings = [own_memory(server.pid)], []
        while (now := time.monotonic()) < began + seconds:
            pings += _ping_until(min(now + seconds / 20, began + seconds), client)
            memory.append(own_memory(server.pid))
        cpu = cpu_seconds(server.pid) - cpu
        for one in processes:
            one.stop()
        timed, *others = (one.report() for one in processes)
    timed.calls[PING] = pings
    for report in (timed, *others):
        for kind, some in report.calls.items():
            report.calls[kind] = [one for one in some if began <= one[0] < now]
    return Window(timed, together(others), cpu, memory)


class Workers:
    """A process of workers, connected when this is entered."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def __enter__(self) -> Workers:
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "bench.workers.process"),
                msgspec.json.encode(self._settings).decode(),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
        )
        if _of(self._process.stdout).readline() != b"ready\n":
            self._end()
            raise RuntimeError("a process of workers could not begin; see what it said above")
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def go(self) -> None:
        self._say(b"go\n")

    def stop(self) -> None:
        """Let them end the prompts that they are at."""
        self._say(b"stop\n")

    def report(self) -> Report:
        """After :meth:`stop`."""
        said, _ = self._process.communicate(timeout=6 * TIMEOUT)
        return msgspec.json.decode(said, type=Report)

    def _say(self, line: bytes) -> None:
        pipe = _of(self._process.stdin)
        pipe.write(line)
        pipe.flush()

    def _end(self) -> None:
        self._process.kill()
        self._process.communicate()


def _of(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe


def _ping_until(end: float, client: CacheClient) -> list[tuple[float, float]]:
    """When each ping was answered, and how long that took."""
    pings = []
    while (began := time.monotonic()) < end:
        ask(client, Ping(), Pong, TIMEOUT)
        now = time.monotonic()
        pings.append((now, now - began))
        time.sleep(PING_EVERY)
    return pings


def own_memory(pid: int) -> int:
    """Bytes of a process that are neither the arena nor files."""
    with open(f"/proc/{pid}/status") as status:
        (line,) = [line for line in status if line.startswith("RssAnon")]
    return int(line.split()[1]) << 10


def cpu_seconds(pid: int) -> float:
    """That a process has used of the processors."""
    with open(f"/proc/{pid}/stat") as stat:
        fields = stat.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
