"""A worker process that stops at a step of a transfer and says so, to be killed there.

The steps are places between which something changes for others: messages that are sent or answered,
and what happens to the arena and to the blocks.
"""

from __future__ import annotations

import subprocess
import sys

REGISTER_STEPS = ("before Register", "after Register", "registered")
STORE_STEPS = (
    *("before PrepareStore", "after PrepareStore", "header erased", "half gathered", "gathered"),
    *("header written", "before CommitStore", "after CommitStore"),
)
LOAD_STEPS = (
    *("before PrepareRetrieve", "after PrepareRetrieve", "headers read", "half scattered"),
    *("scattered", "before CommitRetrieve", "after CommitRetrieve"),
)

CHUNK_TOKENS = 8
BLOCKS = 24
CHUNKS = 3
SOURCE, TARGET = [0, 1, 2, 3, 4, 5], [10, 11, 12, 13, 14, 15]
WAIT = 30.0


def digests():
    return [bytes([number]) * 32 for number in range(1, CHUNKS + 1)]


def open_cache(seed):
    """The cache that every process of a test has, with the content of the seed."""
    from cachekit import BY_NAME, make_cache

    cache = make_cache(BY_NAME["kv_first_hnd"], blocks=BLOCKS)
    cache.fill_random(seed)
    return cache


def open_context(cache, port, instance, mover=None, timeout=WAIT):
    from lmcache_kernels.transfer.engine_driven.context import EngineDrivenContext
    from lmcache_kernels.transfer.keys import shard_id
    from lmcache_kernels.views import group_of

    return EngineDrivenContext(
        [group_of(cache.tensors, cache.axes)],
        chunk_tokens=CHUNK_TOKENS,
        shard=lambda layout: shard_id(layout.fingerprint, index=0, count=1),
        instance=instance,
        port=port,
        mover=mover,
        timeout=timeout,
    )


class Steps:
    """A port before another one, and what else a context needs to call ``reached`` at every step.

    Attributes:
        mover: makes an asynchronous one.
        attachment: a class to be put in the place of the real one.
    """

    def __init__(self, reached, port):
        from held_mover import HeldMover

        from lmcache_kernels.transfer.engine_driven.attachment import Attachment

        class Mover(HeldMover):
            def __init__(self, groups, layout):
                super().__init__(groups, layout)
                one, word = self._host._move_one, {"dst": "gathered", "src": "scattered"}

                def move_one(move, side):
                    found = one(move, side)
                    reached(f"half {word[side]}")
                    return found

                self._host._move_one = move_one

            def _queue(self, direction, moves, run):
                if direction == "load":
                    reached("headers read")
                queued = super()._queue(direction, moves, run)
                reached({"store": "gathered", "load": "scattered"}[direction])
                return queued

        class Watched(Attachment):
            def erase_header(self, offset):
                super().erase_header(offset)
                reached("header erased")

            def write_header(self, offset, digest, fingerprints):
                super().write_header(offset, digest, fingerprints)
                reached("header written")

        self.mover, self.attachment = Mover, Watched
        self._reached, self._port = reached, port

    @property
    def incarnation(self):
        return self._port.incarnation

    @property
    def chunk_tokens(self):
        return self._port.chunk_tokens

    def request(self, message, timeout):
        name = type(message).__name__
        self._reached(f"before {name}")
        future = self._port.request(message, timeout)
        if name != "Unregister":
            future.exception(timeout + 5.0)
            self._reached(f"after {name}")
        return future

    def close(self):
        self._port.close()


class StepPeer:
    """The process: stores or loads at the server at ``url`` until it has reached ``step``."""

    def __init__(self, url, direction, step, instance):
        self._process = subprocess.Popen(
            [sys.executable, __file__, url, direction, step, str(instance)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self._process.pid

    def wait_step(self):
        """Until it stands there; what it says otherwise is an error."""
        said = self._process.stdout.readline().strip()
        assert said == "reached", said or "it has ended"

    def kill(self):
        self._process.kill()
        self._process.communicate(timeout=30)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()


def say(line):
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main(url, direction, step, instance):
    from lmcache_kernels.adapters.messaging.client import CacheClient
    from lmcache_kernels.transfer.engine_driven import registration

    def reached(name):
        if name == step:
            say("reached")
            sys.stdin.read()  # until it is killed, or whoever started it has ended

    client = CacheClient(url, chunk_tokens=CHUNK_TOKENS, instance_id=instance)
    client.wait_ready(WAIT)
    steps = Steps(reached, client)
    registration.Attachment = steps.attachment
    context = open_context(open_cache(1), steps, instance, steps.mover)
    context.register()
    reached("registered")
    if direction == "store":
        context.submit_store(digests(), [SOURCE]).result.result(WAIT)
    else:
        context.submit_retrieve(digests(), [TARGET]).result(WAIT)
    say(f"never reached {step}")


if __name__ == "__main__":
    sys.path.insert(0, __file__.rpartition("/")[0])
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
