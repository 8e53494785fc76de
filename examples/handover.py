"""Prefill hands its KV cache to decode: two processes, and no host memory between two GPUs.

The prefill process writes blocks into the pages of the decode process, in another layout. On two
GPUs they go over NVLink; with one GPU both use it, and without one they share host memory.

python examples/handover.py
"""

from __future__ import annotations

import sys
import time
from multiprocessing import get_context
from typing import TYPE_CHECKING

import torch

from lmcache_kernels import KVTransferError, group_of
from lmcache_kernels.transfer import PeerCopy, PeerTarget

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

LAYERS, TOKENS, HEADS, DIM = 8, 16, 8, 128
GPUS = torch.cuda.device_count()
BLOCKS = 1024 if GPUS else 64
ROUNDS = 8 if GPUS else 2
WAIT = 60.0


def device_of(rank: int) -> str:
    return f"cuda:{rank % GPUS}" if GPUS else "cpu"


def computed(layer: int, device: str) -> torch.Tensor:
    """What prefill computes for a layer: K and V of every block, token-major, any bits."""
    numbers = torch.arange(2 * BLOCKS * TOKENS * HEADS * DIM, dtype=torch.int32, device=device)
    values = (numbers * 40_503 + layer * 7919).to(torch.int16).view(torch.bfloat16)
    return values.view(2, BLOCKS, TOKENS, HEADS, DIM)


def receive(pipe: Connection) -> bytes:
    if not pipe.poll(WAIT):
        raise TimeoutError(f"the other process said nothing for {WAIT} s")
    return pipe.recv_bytes()


def decode(pipe: Connection) -> None:
    """Offer empty head-major pages, and see that the right bytes come."""
    device = device_of(1)
    shape = (2, BLOCKS, HEADS, TOKENS, DIM)
    pages = [torch.zeros(shape, dtype=torch.bfloat16, device=device) for _ in range(LAYERS)]
    with PeerTarget({f"layer {number}": page for number, page in enumerate(pages)}) as target:
        pipe.send_bytes(target.offer)
        for _ in range(ROUNDS):
            pipe.send_bytes(target.ready())
            target.wait(receive(pipe), WAIT)
        for layer, page in enumerate(pages):
            # Block b was sent to BLOCKS - 1 - b. Bits are compared: some of them are NaN.
            there = page.flip(1).transpose(2, 3).contiguous().view(torch.int16)
            assert torch.equal(there, computed(layer, device).view(torch.int16)), layer
        pipe.send_bytes(b"every byte is right")
        receive(pipe)


def run_decode(pipe: Connection) -> None:
    try:
        decode(pipe)
    except KVTransferError as error:  # no room in /dev/shm, for example
        sys.exit(f"decode: {error}")


def prefill(pipe: Connection) -> None:
    device = device_of(0)
    caches = [computed(layer, device) for layer in range(LAYERS)]
    groups = [group_of(caches, "kv block token head dim")]
    blocks, reverse = range(BLOCKS), range(BLOCKS - 1, -1, -1)
    seconds = []
    with PeerCopy(
        groups, receive(pipe), lambda pages: [group_of(pages, "kv block head token dim")]
    ) as copy:
        for _ in range(ROUNDS):
            ready = receive(pipe)
            start = time.perf_counter()
            written = copy.copy([reverse], [blocks], after=ready, timeout=WAIT)
            pipe.send_bytes(written)
            copy.flush(WAIT)
            seconds.append(time.perf_counter() - start)
        print(f"decode on {device_of(1)}: {receive(pipe).decode()}")
    pipe.send_bytes(b"bye")
    nbytes = sum(cache.nbytes for cache in caches)
    rate = nbytes / min(seconds) / 1e9
    print(f"prefill on {device} handed over {nbytes >> 20} MiB at {rate:.1f} GB/s")


def main() -> None:
    ours, theirs = get_context("spawn").Pipe()
    process = get_context("spawn").Process(target=run_decode, args=(theirs,))
    process.start()
    theirs.close()  # so that the pipe ends with the other process
    try:
        prefill(ours)
        process.join(WAIT)
    except EOFError:
        process.join(WAIT)
        sys.exit("decode ended before it was handed everything; it says why above")
    finally:
        process.kill()
    assert process.exitcode == 0, "decode failed"


if __name__ == "__main__":
    main()
