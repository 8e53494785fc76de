"""A cache server as another process, whose copies stand still in the middle when told to, as does its
letting go of a worker's cache.

One line of JSON for each order, answer and event.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from typing import ClassVar

WAIT = 60.0


class HeldServer:
    """The process.

    Attributes:
        arenas: names of all that there were.

    Args:
        url: where it listens.
        arena_bytes, chunk_tokens, worker_ttl: see the service.
    """

    arenas: ClassVar[set] = set()

    def __init__(self, *, url="tcp://127.0.0.1:0", arena_bytes=1 << 18, chunk_tokens, worker_ttl):
        settings = {
            "url": url,
            "arena_bytes": arena_bytes,
            "chunk_tokens": chunk_tokens,
            "worker_ttl": worker_ttl,
        }
        self._process = subprocess.Popen(
            [sys.executable, __file__, json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self._process.pid
        self._events, self._answers = queue.Queue(), queue.Queue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        self.url, self.arena_name = self._answers.get(timeout=WAIT)
        self.arenas.add(self.arena_name)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.end()

    def hold(self):
        """Copies stand still from now on, with one chunk moved if they have several; and so does
        closing a cache."""
        self._order("hold")

    def wait_held(self):
        """Until one does; "gather", "scatter" or "close"."""
        return self._events.get(timeout=WAIT)

    def let_go(self):
        """All go on, those that come too."""
        self._order("let_go")

    def stats(self):
        return self._order("stats")

    def mappings(self, name):
        """How often it has a file of that name mapped."""
        with open(f"/proc/{self.pid}/maps") as maps:
            return sum(name in line for line in maps)

    def descriptors(self):
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def kill(self):
        """SIGKILL."""
        self._process.kill()
        self.end()

    def end(self):
        """Stop it, if it runs; the exit status."""
        if self._process.poll() is None:
            self._process.stdin.close()
        try:
            status = self._process.wait(WAIT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise
        self._reader.join(WAIT)
        self._process.stdout.close()
        self._process.stdin.close()
        return status

    def _order(self, name):
        self._process.stdin.write(json.dumps(name) + "\n")
        self._process.stdin.flush()
        return self._answers.get(timeout=WAIT)

    def _read(self):
        for line in self._process.stdout:
            kind, value = json.loads(line)
            (self._events if kind == "event" else self._answers).put(value)


def main(settings):
    from lmcache_kernels.adapters.messaging.server import CacheServerLoop
    from lmcache_kernels.transfer.memory.arena import Arena
    from lmcache_kernels.transfer.serving.known_workers import Liveness
    from lmcache_kernels.transfer.serving.service import CacheService

    def say(kind, value):
        sys.stdout.write(json.dumps([kind, value]) + "\n")
        sys.stdout.flush()

    going = threading.Event()
    going.set()
    orders = queue.SimpleQueue()

    class Watched(CacheService):
        """Answers orders in the thread that serves."""

        def finished(self, now):
            while not orders.empty():
                name = orders.get()
                if name == "hold":
                    going.clear()
                elif name == "let_go":
                    going.set()
                say("answer", self.stats() if name == "stats" else None)
            return super().finished(now)

    def install():
        """When the first cache is opened, because that loads torch."""
        from lmcache_kernels.transfer.moving import movers
        from lmcache_kernels.transfer.moving.host_mover import HostMover

        class Halting(HostMover):
            def gather(self, moves, after, layers=None):
                return self._halt("gather", moves)

            def scatter(self, moves, after, layers=None):
                return self._halt("scatter", moves)

            def close(self):
                if not going.is_set():
                    say("event", "close")
                    assert going.wait(WAIT)
                super().close()

            def _halt(self, direction, moves):
                run = HostMover.gather if direction == "gather" else HostMover.scatter
                if not going.is_set():
                    run(self, moves[:-1], None)
                    say("event", direction)
                    assert going.wait(WAIT)
                return run(self, moves, None)

        movers.HostMover = Halting

    def obey(stop):
        for line in sys.stdin:
            orders.put(json.loads(line))
            loop.wake()
        going.set()
        stop()

    with CacheServerLoop(settings["url"], incarnation=os.urandom(8).hex()) as loop:
        arena = Arena.create(settings["arena_bytes"])
        service = Watched(
            arena_name=arena.name,
            arena_bytes=arena.nbytes,
            chunk_tokens=settings["chunk_tokens"],
            incarnation=loop._incarnation,
            liveness=Liveness(settings["worker_ttl"], settings["worker_ttl"]),
            arena=arena,
            wake=loop.wake,
        )
        real = service._caches._open

        def opening(request):
            install()
            return real(request)

        service._caches._open = opening
        threading.Thread(target=obey, args=(loop.stop,), daemon=True).start()
        say("answer", [loop.endpoint, arena.name])
        loop.run(service)
        service.close()
        arena.close()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
