"""Another process that opens shared tensors, and does with them what it is told.

One line of JSON for each order and each answer, so that a test knows when something is done.
"""

from __future__ import annotations

import base64
import json
import subprocess
import sys


class SharePeer:
    """The process. Orders are methods; each returns when it was carried out."""

    def __init__(self):
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self._process.pid

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self._process.poll() is None:
            self._process.kill()
        self._process.communicate(timeout=30)

    def open(self, data: bytes) -> int:
        """Open encoded descriptors; how many tensors it has now."""
        return self._order("open", _text(data))

    def read(self, index: int) -> list[bytes]:
        """The elements of a tensor in the order of its axes, each as its bytes."""
        raw = base64.b64decode(self._order("read", index))
        size = self._order("itemsize", index)
        return [raw[i : i + size] for i in range(0, len(raw), size)]

    def form(self, index: int) -> list:
        """Its shape, strides, dtype, device type, and how its address differs from tensor 0's."""
        return self._order("form", index)

    def write(self, index: int, byte: int) -> None:
        """Set every byte of the tensor's elements."""
        self._order("write", index, byte)

    def wait(self, handle: bytes) -> None:
        """Open the event and let the stream that reads wait for it."""
        self._order("wait", _text(handle))

    def wrap(self, nbytes: int, device: str = "cpu") -> bytes:
        """Make a tensor of its own, all 7s, and share it; the encoded descriptors."""
        return base64.b64decode(self._order("wrap", nbytes, device))

    def mappings(self, name: str) -> int:
        """How often the named file is mapped."""
        return self._order("mappings", name)

    def close(self) -> None:
        """Close what was opened."""
        self._order("close")

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()
        self._process.communicate(timeout=30)

    def finish(self) -> None:
        self._process.communicate("", timeout=60)
        assert self._process.returncode == 0

    def _order(self, *order):
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline() or '["it has ended", null]')
        if answer[0]:
            raise RuntimeError(answer[0])
        return answer[1]


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


class _Child:
    def __init__(self):
        self._opened, self._tensors, self._wrapped = [], [], []

    def open(self, data):
        from lmcache_kernels.transfer.sharing.descriptors import decode
        from lmcache_kernels.transfer.sharing.wrapping import open_kv_caches

        caches = open_kv_caches(decode(base64.b64decode(data)))
        self._opened.append(caches)
        self._tensors += caches.tensors
        return len(self._tensors)

    def _elements(self, index):
        import torch

        tensor = self._tensors[index]
        return tensor.unsqueeze(-1).view(torch.uint8)

    def read(self, index):
        return _text(self._elements(index).cpu().numpy().tobytes())

    def itemsize(self, index):
        return self._tensors[index].itemsize

    def form(self, index):
        one, first = self._tensors[index], self._tensors[0]
        device, apart = one.device.type, one.data_ptr() - first.data_ptr()
        return [list(one.shape), list(one.stride()), str(one.dtype), device, apart]

    def write(self, index, byte):
        import torch

        self._elements(index).fill_(byte)
        if self._tensors[index].is_cuda:
            torch.cuda.current_stream().synchronize()

    def wait(self, handle):
        import torch

        from lmcache_kernels.transfer.sharing.ipc_events import import_event

        event = import_event(base64.b64decode(handle), "cuda:0")
        torch.cuda.current_stream().wait_event(event)

    def wrap(self, nbytes, device):
        import torch

        from lmcache_kernels.transfer.sharing.descriptors import encode
        from lmcache_kernels.transfer.sharing.wrapping import wrap_kv_caches

        tensor = torch.full((nbytes,), 7, dtype=torch.uint8, device=device)
        if tensor.is_cuda:
            torch.cuda.current_stream().synchronize()
        self._wrapped.append(wrap_kv_caches({"layer": tensor}))
        return _text(encode(self._wrapped[-1].descriptors))

    def mappings(self, name):
        with open("/proc/self/maps") as maps:
            return sum(name in line for line in maps)

    def close(self):
        self._tensors.clear()
        while self._opened:
            self._opened.pop().close()


def main():
    child = _Child()
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        try:
            answer = [None, getattr(child, name)(*arguments)]
        except Exception as error:
            answer = [f"{type(error).__name__}: {error}", None]
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
