"""Another process at the other end of a hand-over, which does what it is told.

One line of JSON for each order and each answer, so that a test knows when something is done.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from functools import partial

import torch
from cachekit import BY_NAME, make_cache, oracle_chunk, untouched_outside

from lmcache_kernels import errors, group_of
from lmcache_kernels.transfer import PeerCopy, PeerTarget

WAIT = 30


def caches_of(specs, device="cpu"):
    """Caches with random bytes in them: for each a dict of layout, seed and sizes."""
    made = []
    for spec in specs:
        sizes = {name: value for name, value in spec.items() if name not in ("layout", "seed")}
        cache = make_cache(BY_NAME[spec["layout"]], device=device, **sizes)
        cache.fill_random(spec["seed"])
        made.append(cache)
    return made


def groups_of(caches):
    return [group_of(cache.tensors, cache.axes) for cache in caches]


def describe(specs):
    """What a PeerCopy takes to make groups of the tensors of such caches."""
    shapes = caches_of(specs)

    def groups(tensors):
        found, start = [], 0
        for cache in shapes:
            end = start + len(cache.tensors)
            found.append(group_of(tensors[start:end], cache.axes))
            start = end
        return found

    return groups


def settle(device):
    if device != "cpu":
        torch.cuda.current_stream(torch.device(device)).synchronize()


def sleep(device, cycles):
    """Keep a GPU's current stream busy."""
    with torch.cuda.device(device):
        torch.cuda._sleep(cycles)


class HandoverPeer:
    """The process. Orders are the methods of :class:`Child`; what one raises is raised here.

    Args:
        environment: variables that it sees besides this process's.
    """

    def __init__(self, **environment):
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self._process.pid

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()

    def kill(self):
        """SIGKILL, and gone when this returns."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.communicate(timeout=WAIT)

    def finish(self):
        """Let it end by itself."""
        self._process.communicate("", timeout=WAIT)
        assert self._process.returncode == 0

    def start(self, *order):
        """Give an order without waiting for its answer."""
        self._process.stdin.write(json.dumps(order, default=_pack) + "\n")
        self._process.stdin.flush()

    def answer(self):
        line = self._process.stdout.readline()
        assert line, "the peer has ended"
        kind, value = json.loads(line, object_hook=_unpack)
        if kind:
            raise getattr(errors, kind, RuntimeError)(value)
        return value

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)
        return partial(self._order, name)

    def _order(self, *order):
        self.start(*order)
        return self.answer()


class Child:
    def __init__(self):
        self.target = self.sender = None

    def offer(self, specs, device="cpu"):
        """Make caches and offer them."""
        self.device, self.caches = device, caches_of(specs, device)
        tensors = [tensor for cache in self.caches for tensor in cache.tensors]
        self._settle()
        self.target = PeerTarget({str(i): tensor for i, tensor in enumerate(tensors)})
        for cache in self.caches:  # in host memory they have moved
            cache.storages = [
                torch.empty(0, dtype=torch.uint8, device=device).set_(tensor.untyped_storage())
                for tensor in cache.tensors
            ]
        self.before = [cache.snapshot() for cache in self.caches]
        return self.target.offer

    def ready(self, cycles=0, poison=None):
        """A signal; on a GPU, behind so many cycles of work and a fill of everything."""
        if cycles:
            sleep(self.device, cycles)
        if poison is not None:
            for cache in self.caches:
                cache.fill(poison)
        return self.target.ready()

    def wait(self, written, timeout=WAIT):
        self.target.wait(written, timeout)

    def read(self, which, ids):
        """The canonical bytes of blocks of a cache."""
        return oracle_chunk(self.caches[which], ids).numpy().tobytes()

    def untouched(self, which, ids):
        """Whether all but these blocks of a cache is as it was offered."""
        return untouched_outside(self.caches[which], self.before[which], ids)

    def close(self):
        self.target.close()

    def give(self, specs, offer, there, dst, src, after=None, device="cuda:0", cycles=0):
        """Be the other end: make caches and copy blocks of them; the signal. On a GPU, behind work."""
        self.device, self.own = device, caches_of(specs, device)
        self._settle()
        self.sender = PeerCopy(groups_of(self.own), offer, describe(there))
        if cycles:
            sleep(device, cycles)
        return self.sender.copy(dst, src, after=after)

    def _settle(self):
        settle(self.device)


def _pack(data):
    return {"bytes": base64.b64encode(data).decode()}


def _unpack(found):
    return base64.b64decode(found["bytes"]) if found.keys() == {"bytes"} else found


def main():
    child = Child()
    for line in sys.stdin:
        name, *arguments = json.loads(line, object_hook=_unpack)
        try:
            answer = [None, getattr(child, name)(*arguments)]
        except Exception as error:
            answer = [type(error).__name__, str(error)]
        sys.stdout.write(json.dumps(answer, default=_pack) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
