"""The processes of a fleet that is killed at random: what there is, and one of them.

Whatever else can fail becomes an entry of :data:`KINDS`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from chaos_worker import BOUND, CHUNK_TOKENS

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parents[2]
SEGMENT = re.compile(r"/dev/shm/lmcache_kernels_[0-9a-f]{32}")
SIZE_GB = 1 / 64  # has room for a fifth of the chunks that there are
REAPED = 30
"""Seconds after which a silent worker counts as dead; fewer are refused."""


@dataclass(frozen=True)
class Kind:
    """A kind of process.

    Attributes:
        count: how many there are at a time.
        weight: how often one of them is killed, in relation to other kinds.
        command: how one is started, by the fleet and its number among its kind.
        serves: what it prints when it can be used; "": it is a worker.
        server_arguments: what a server must be told to use it.
        busy: files and threads that one may have now and then, beside those it always has.
        remembered: files and threads that a server may have for a dead one until it counts as dead.
        traces: paths of what it would leave behind if it were killed now, and another one removes.
        ours: whether what it logs and how much memory it has is for us to answer for.
    """

    count: int
    weight: int
    command: Callable
    serves: str = ""
    server_arguments: Callable = lambda fleet: []
    busy: int = 2
    remembered: int = 0
    traces: Callable = lambda fleet: set()
    ours: bool = True


def _server(fleet, number):
    told = [argument for kind in KINDS.values() for argument in kind.server_arguments(fleet)]
    return [
        *(sys.executable, "-m", "lmcache_kernels.adapters.server", "--stop-on-eof"),
        *("--port", str(fleet.port), "--l1-size-gb", str(SIZE_GB)),
        *("--http-port", "-1", "--drain-timeout-seconds", "0"),
        *("--chunk-size", str(CHUNK_TOKENS)),
        *("--worker-reap-timeout-seconds", str(REAPED)),
        *("--worker-registration-grace-seconds", str(REAPED)),
        *told,
    ]


def _files(fleet):
    """A tier that outlives every server, with room for a quarter of the chunks that there are."""
    return ["--l2-tier", f"file://{fleet.directory}/files?size_gb=0.02"]


def _unfinished_files(fleet):
    return set((fleet.directory / "files").rglob("tmp/*"))


def _redis(fleet, number):
    return [
        *(REDIS, "--port", str(fleet.tier_port), "--bind", "127.0.0.1", "--save", ""),
        *("--appendonly", "no", "--maxmemory", "40mb", "--maxmemory-policy", "allkeys-lru"),
    ]


def _in_redis(fleet):
    return ["--l2-tier", f"valkey://127.0.0.1:{fleet.tier_port}/0"]


def _worker(mode, first):
    def command(fleet, number):
        # It may come back as who it was, whose work is discarded then, or as somebody else.
        same = fleet.chance.random() < 0.7
        instance = first + number if same else fleet.chance.getrandbits(62)
        options = {"instance": instance, "mode": mode, "seed": fleet.chance.getrandbits(32)}
        script = str(Path(__file__).with_name("chaos_worker.py"))
        return [sys.executable, script, fleet.url, json.dumps(options)]

    return command


REDIS = (
    importlib.util.find_spec("valkey")  # without the client a server refuses such a tier
    and (shutil.which("valkey-server") or shutil.which("redis-server"))
)
KINDS: dict[str, Kind] = {
    "server": Kind(
        *(1, 3, _server, "serving"),
        busy=12,  # files and connections of its tiers
        server_arguments=_files,
        traces=_unfinished_files,
    ),
    "engine-driven worker": Kind(2, 3, _worker("engine_driven", 100)),
    "lmcache-driven worker": Kind(1, 2, _worker("lmcache_driven", 200), remembered=2),
}
"""In the order in which they are started."""
if REDIS:
    redis = Kind(1, 1, _redis, "Ready to accept", server_arguments=_in_redis, ours=False)
    KINDS = {"redis": redis, **KINDS}


class Member:
    """A process. What it prints goes to the events of its fleet: JSON, or ``says``.

    Attributes:
        serves: it has said that it can be used.
        transferred_with: incarnation of the server of its last load or store.
    """

    def __init__(self, fleet, kind, number):
        self.kind, self.number = kind, number
        self.serves, self.transferred_with = False, None
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        path = filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
        self._process = subprocess.Popen(
            KINDS[kind].command(fleet, number),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            cwd=ROOT,
            # One thread for each: they are many, and processors are few.
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"},
        )
        self.pid = self._process.pid
        self._reader = threading.Thread(target=self._read, args=(fleet.events,))
        self._reader.start()

    def __repr__(self):
        return f"{self.kind} {self.number}"

    def _read(self, events):
        for line in self._process.stdout:
            try:
                event = json.loads(line)
            except ValueError:
                event = {"says": line.decode(errors="replace")}
            events.put((self, event))

    def note(self, event):
        """It has printed this."""
        word = KINDS[self.kind].serves
        self.serves = self.serves or bool(word and word in event.get("says", ""))
        if event.get("call") in ("load", "store") and event["server"]:
            self.transferred_with = event["server"]

    def kill(self):
        """SIGKILL, whatever it is doing; what is to be complained of."""
        ended = self._process.poll()
        os.kill(self.pid, signal.SIGKILL) if ended is None else None
        return self._gone() or (f"it had ended by itself: {ended}" if ended is not None else "")

    def stop(self):
        """As if its parent had ended, or it was told to; what is to be complained of."""
        self._process.stdin.close()
        if KINDS[self.kind].serves:
            self._process.terminate()
        try:
            self._process.wait(BOUND)
        finally:
            self._process.kill()
        return self._gone()

    def _gone(self):
        self._process.wait()
        self._reader.join()
        self._process.stdin.close()
        self._process.stdout.close()
        with self._log as log:
            log.seek(0)
            said = log.read().decode(errors="replace")
        bad = KINDS[self.kind].ours and ("Traceback" in said or " ERROR " in said)
        return said[-3000:] if bad else ""


def segments(pid):
    """Paths of the shared memory that a process has mapped."""
    return set(map(Path, SEGMENT.findall(Path(f"/proc/{pid}/maps").read_text())))


def usage(pid):
    """Its open files, and its threads."""
    return tuple(len(os.listdir(f"/proc/{pid}/{what}")) for what in ("fd", "task"))


def own_memory(pid):
    """Bytes of a process that are neither files nor shared."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) << 10
