"""Harm a server's arena on purpose."""

from __future__ import annotations

import random

from lmcache_kernels.fingerprint import fingerprint
from lmcache_kernels.transfer.memory.arena import Arena
from lmcache_kernels.transfer.memory.slot_header import HEADER_BYTES, MAGIC, pack_header


def slots(view):
    """Offsets of the slots that hold a chunk."""
    whole = bytes(view)
    found, position = [], whole.find(MAGIC)
    while position >= 0:
        found.append(position)
        position = whole.find(MAGIC, position + HEADER_BYTES)
    return found


def damage_headers(server, keep=0):
    """Spoil the header of every slot but the first ``keep``; returns how many."""
    arena = Arena.attach(server.arena_name, server.arena_bytes)
    view = arena.view(0, arena.nbytes)
    hit = slots(view)[keep:]
    for offset in hit:
        view[offset : offset + len(MAGIC)] = b"\xff" * len(MAGIC)
    view.release()
    arena.close()
    return len(hit)


def flip_payload_bit(server, chunk, bit):
    """Flip one bit of the payload of the ``chunk``-th slot."""
    arena = Arena.attach(server.arena_name, server.arena_bytes)
    view = arena.view(0, arena.nbytes)
    place = slots(view)[chunk] + HEADER_BYTES + bit // 8
    view[place] ^= 1 << bit % 8
    view.release()
    arena.close()


def damage(arena, digest, where):
    """Spoil the header, or the payload, of the chunk of this name.

    Args:
        arena: mapped.
    """
    view = arena.view(0, arena.nbytes)
    (offset,) = [one for one in slots(view) if bytes(view[one + 56 : one + 88]) == digest]
    view[offset + {"header": 8, "payload": HEADER_BYTES}[where]] ^= 0x10
    view.release()


def scramble_payloads(server, span=4096):
    """Overwrite what lies behind every header, up to the next one or ``span`` pieces of it.

    Headers get the fingerprint of it, as if such chunks had been stored.
    """
    arena = Arena.attach(server.arena_name, server.arena_bytes)
    view = arena.view(0, arena.nbytes)
    offsets = slots(view)
    noise = random.Random(5)
    for offset, end in zip(offsets, [*offsets[1:], None], strict=True):
        end = end or offset + (offsets[1] - offsets[0] if len(offsets) > 1 else span)
        size = end - offset - HEADER_BYTES
        # Small float32 numbers rather than noise bits, which would mostly be NaN or huge.
        payload = bytes(
            byte if i % 4 != 3 else 0x3F for i, byte in enumerate(noise.randbytes(size))
        )
        view[offset + HEADER_BYTES : end] = payload
        header = bytes(view[offset : offset + HEADER_BYTES])
        shard, digest, nbytes = (
            header[24:56],
            header[56:88],
            int.from_bytes(header[16:24], "little"),
        )
        view[offset : offset + HEADER_BYTES] = pack_header(
            shard, digest, nbytes, [fingerprint(payload[:nbytes])]
        )
    view.release()
    arena.close()
    return len(offsets)
