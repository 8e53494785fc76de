"""Random planes over poisoned memory, and what a copy between two of them must leave behind."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from cachekit import POISON
from hypothesis import strategies as st

from lmcache_kernels import Plane


@dataclass
class Side:
    """One plane and the memory behind it, poison included."""

    plane: Plane
    memory: torch.Tensor  # uint8

    def run_at(self, row: int, block: int, token: int, head: int) -> slice:
        p = self.plane
        outer, inner = divmod(block, p.split)
        start = (
            p.bases[row]
            - self.memory.data_ptr()
            + outer * p.block_stride
            + inner * p.split_stride
            + token * p.token_stride
            + head * p.head_stride
        )
        return slice(start, start + p.width)


@st.composite
def sides(draw, shape, device: str):
    """A side of the given (rows, tokens, heads, width): any nesting of the axes, any padding."""
    rows, tokens, heads, width = shape
    split = draw(st.sampled_from([1, 1, 2, 3]))
    outer = draw(st.integers(1, 4))
    extents = {"row": rows, "block": outer, "split": split, "token": tokens, "head": heads}
    grain = draw(st.sampled_from([1, 2, 4, 16]))
    stride, step = {}, -(-width // grain) * grain
    for axis in draw(st.permutations(sorted(extents))):
        stride[axis] = step
        step = step * extents[axis] + draw(st.sampled_from([0, 0, 1, 5])) * grain
    lead = draw(st.integers(0, 3)) * grain + 64
    memory = torch.full((lead + step + 64,), POISON, dtype=torch.uint8).to(device)
    order = draw(st.permutations(range(rows)))
    plane = Plane(
        bases=tuple(memory.data_ptr() + lead + row * stride["row"] for row in order),
        num_blocks=outer * split,
        block_tokens=tokens,
        num_heads=heads,
        width=width,
        block_stride=stride["block"],
        token_stride=stride["token"],
        head_stride=stride["head"],
        device=device,
        split=split,
        split_stride=stride["split"],
    )
    return Side(plane, memory)


def expected_memory(
    dst: Side,
    dst_ids: list[int],
    src: Side,
    src_ids: list[int],
    start: torch.Tensor | None = None,
) -> torch.Tensor:
    """The destination's memory after the copy, one run after the other; ``start``: before it."""
    after = (dst.memory if start is None else start).cpu().clone()
    before = src.memory.cpu()
    plane = dst.plane
    for (to, origin), row, token, head in itertools.product(
        list(zip(dst_ids, src_ids, strict=True)),
        range(plane.rows),
        range(plane.block_tokens),
        range(plane.num_heads),
    ):
        if to >= 0:
            after[dst.run_at(row, to, token, head)] = before[src.run_at(row, origin, token, head)]
    return after


def fill_random(memory: torch.Tensor, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    memory.copy_(torch.randint(0, 256, memory.shape, dtype=torch.uint8, generator=generator))


@dataclass
class Chunks:
    """Whole chunks in one piece of memory: per group the sides of its planes, all over that memory."""

    groups: list[list[Side]]
    blocks: list[int]  # of a chunk, per group
    memory: torch.Tensor
    payload: int  # bytes
    count: int

    def rows_of(self, chunk: int, named: list[list[int]]) -> list[bytes]:
        """Per row, a chunk's payload where only that row of the blocks ``named`` is not zero."""
        found = []
        start = min(side.plane.bases[0] for group in self.groups for side in group)
        for sides_, blocks, ids in zip(self.groups, self.blocks, named, strict=True):
            for side in sides_:
                plane = side.plane
                for row, base in enumerate(plane.bases):
                    payload = bytearray(self.payload)
                    for block in (block for block in ids if block // blocks == chunk):
                        at = side.run_at(row, block, 0, 0).start
                        place = base - start + block % blocks * plane.split_stride
                        payload[place : place + plane.block_bytes] = (
                            side.memory[at : at + plane.block_bytes].cpu().numpy().tobytes()
                        )
                    found.append(bytes(payload))
        return found


@st.composite
def chunks_of(draw, shapes, device: str):
    """Chunks for groups of planes of the given (rows, tokens, heads, width), with gaps anywhere."""
    count = draw(st.integers(1, 3))
    blocks = [draw(st.integers(1, 3)) for _ in shapes]
    offset, laid = 0, []
    for group, per_chunk in zip(shapes, blocks, strict=True):
        for rows, tokens, heads, width in group:
            if laid:  # planes begin where a word does
                offset = -(-offset // 4) * 4 + draw(st.sampled_from([0, 0, 4, 512]))
            laid.append((offset, rows, tokens, heads, width, per_chunk))
            offset += rows * per_chunk * tokens * heads * width
    payload = -(-offset // 4) * 4
    stride = payload + draw(st.sampled_from([0, 4, 64]))
    lead = 64 + draw(st.sampled_from([0, 4, 16]))
    memory = torch.full((lead + count * stride + 64,), POISON, dtype=torch.uint8).to(device)
    planes = []
    for start, rows, tokens, heads, width, per_chunk in laid:
        size = tokens * heads * width
        first = memory.data_ptr() + lead + start
        plane = Plane(
            bases=tuple(first + row * per_chunk * size for row in range(rows)),
            num_blocks=count * per_chunk,
            block_tokens=tokens,
            num_heads=heads,
            width=width,
            block_stride=stride,
            token_stride=heads * width,
            head_stride=width,
            device=device,
            split=per_chunk,
            split_stride=size,
        )
        planes.append(Side(plane, memory))
    groups, at = [], 0
    for group in shapes:
        groups.append(planes[at : at + len(group)])
        at += len(group)
    return Chunks(groups, blocks, memory, payload, count)
