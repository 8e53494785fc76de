"""A worker as another process: its cache in shared memory or on a GPU, copied by a server.

One line of JSON for each order and each answer.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import ClassVar

BLOCKS, TOKENS, WIDTH = 16, 4, 32
CHUNK = 8  # two blocks
WAIT = 60.0


def digests(count, first=0):
    return [bytes([first + i]) * 32 for i in range(count)]


def make_tensor(fill=None, device="cpu"):
    """int16[BLOCKS, TOKENS, WIDTH]; every block holds its number, or ``fill``."""
    import torch

    blocks = torch.arange(BLOCKS) if fill is None else torch.full((BLOCKS,), fill)
    blocks = blocks.to(torch.int16).to(device)
    return blocks.repeat_interleave(TOKENS * WIDTH).view(-1, TOKENS, WIDTH)


class ServedWorker:
    """The process.

    Attributes:
        segments: names of all that there were.
    """

    segments: ClassVar[set] = set()

    def __init__(self, url, **options):
        self._process = subprocess.Popen(
            [sys.executable, __file__, url, json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self._process.pid
        self.segment = self._answer()
        self.segments.add(self.segment)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()

    def submit(self, direction, chunks, first=0):
        """Chunks ``first`` and so on, out of or into blocks from 0 on; the answer is not waited for."""
        self._order("submit", direction, chunks, first)

    def compute(self, cycles, value):
        """Queue on the GPU: so many cycles of nothing, then every block holds ``value``."""
        self._order("compute", cycles, value)

    def result(self):
        """Of what was submitted: a number of chunks, or the name of an error."""
        return self._order("result")

    def block_values(self):
        """What the first token of each block holds."""
        return self._order("values")

    def register(self):
        self._order("register")

    def usage(self):
        """Open files and threads."""
        return self._order("usage")

    def close(self):
        self._order("close")

    def kill(self):
        """SIGKILL."""
        self._process.kill()
        self._process.communicate(timeout=WAIT)

    def _order(self, *order):
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self):
        return json.loads(self._process.stdout.readline())


class _Child:
    def __init__(self, url, options):
        from lmcache_kernels.adapters.messaging.client import CacheClient
        from lmcache_kernels.transfer.cache_forms import ShardPart
        from lmcache_kernels.transfer.context_factory import create_transfer_context
        from lmcache_kernels.transfer.kv_groups import KVGroup

        self._tensor = make_tensor(options.pop("fill", None), options.pop("device", "cpu")).clone()
        instance = options.pop("instance")
        vouch = options.pop("vouch", True)
        self._client = CacheClient(
            url, ping_interval=0.2, instance_id=instance if vouch else None, chunk_tokens=CHUNK
        )
        self._client.wait_ready(WAIT)
        self._context = create_transfer_context(
            [KVGroup.of(self._tensor, "block token dim")],
            options.pop("mode", "lmcache_driven"),
            chunk_tokens=CHUNK,
            part=ShardPart(),
            instance=instance,
            port=self._client,
            **options,
        )
        self._context.register()
        self._future = None

    def segment(self):
        wrapped = getattr(self._context, "_wrapped", None)
        return getattr(wrapped.descriptors[0].share, "segment", None) if wrapped else None

    def submit(self, direction, chunks, first):
        ids = [list(range(2 * chunks))]
        if direction == "store":
            self._future = self._context.submit_store(digests(chunks, first), ids).result
        else:
            self._future = self._context.submit_retrieve(digests(chunks, first), ids)

    def compute(self, cycles, value):
        import torch

        torch.cuda._sleep(cycles)
        self._tensor.fill_(value)

    def result(self):
        try:
            return self._future.result(WAIT)
        except Exception as error:
            return type(error).__name__

    def values(self):
        return self._tensor[:, 0, 0].tolist()

    def register(self):
        self._client.wait_ready(WAIT)
        self._context.register()

    def usage(self):
        return [len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))]

    def close(self):
        self._context.close()


def main(url, options):
    child = _Child(url, options)

    def say(value):
        sys.stdout.write(json.dumps(value) + "\n")
        sys.stdout.flush()

    say(child.segment())
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        say(getattr(child, name)(*arguments))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
