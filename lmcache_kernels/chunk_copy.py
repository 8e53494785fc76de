"""Copies between a cache and chunks that lie anywhere, cut into parts of a chunk's payload.

A transfer moves a chunk part by part: each is one stretch of the payload and one launch. The kernel
numbers its tiles in the order of the payload, so a part is a range of tiles, and the address of the
chunk is an argument of the launch. One prepared copy thus serves every chunk, slot and slice.
"""

from __future__ import annotations

from bisect import bisect_left
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, Protocol

from .copy_plan import CopyPlan
from .errors import LayoutError
from .ids import pack_ids

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from typing import TypeAlias

    import torch

    from .chunk_layout import ChunkLayout
    from .copy_config import CopyConfig
    from .copy_plan import Side
    from .plane import CacheGroup, Plane

    Layers: TypeAlias = Sequence[Sequence[int]]
    """Per group, for each of its layers in the order of its rows: when the engine needs it."""

    Aside: TypeAlias = "tuple[int, int] | None"
    """A stream that is not the usual one, and how many programs a launch has there."""


class ChunkPart(NamedTuple):
    """A stretch of a chunk's payload.

    Attributes:
        offset, nbytes: where it lies in the payload.
        first_tile, end_tile: the tiles that move it.
        first_layer, last_layer: places of its layers in the order that it was cut by.
        group: whose blocks it is of; a part never goes on into another's.
        last: no part of its group comes behind it.
    """

    offset: int
    nbytes: int
    first_tile: int
    end_tile: int
    first_layer: int = 0
    last_layer: int = 0
    group: int = 0
    last: bool = False


class Queue(Protocol):
    """See :meth:`ChunkCopy.queued`."""

    def __call__(
        self,
        chunk: int,
        part: ChunkPart,
        address: int,
        sums: torch.Tensor,
        total_at: int = 0,
        aside: Aside = None,
    ) -> None: ...


class ChunkCopy:
    """A prepared copy between one cache and chunks of its layout, on a GPU or interpreted.

    Args:
        groups: the cache.
        layout: of the chunks.
        chunk_side: "dst" to write chunks, "src" to read them.
        max_programs: bound on the grid of a launch, or None.
        staged: chunks pass through slices of device memory that are used again and again.
        writes: False to make the fingerprints that a gather would, and write nothing.

    Raises:
        LayoutError: planes that no copy can move.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        layout: ChunkLayout,
        chunk_side: Side,
        *,
        max_programs: int | None = None,
        staged: bool = False,
        writes: bool = True,
    ) -> None:
        from .kernel_copy import KernelCopy

        device = groups[0].device
        self.plan = CopyPlan.of(
            pair_planes(groups, layout.planes_at(0, device), chunk_side), chunk_side
        )
        self._blocks = layout.blocks_per_chunk
        self._pools = [group.num_blocks for group in groups]
        self._chunk_ids = [
            pack_ids(range(count), count, "", False) for count in layout.blocks_per_chunk
        ]
        self._chunk_side = chunk_side
        self._executor = KernelCopy(
            self.plan,
            device,
            max_programs=max_programs,
            max_launch_bytes=layout.nbytes,
            staged=staged,
            writes=writes,
        )

    def cut(
        self, sizes: Iterable[int], layers: Layers | None = None, ends: Sequence[int] = ()
    ) -> list[ChunkPart]:
        """The parts of a chunk; part ``i`` has ``sizes[i]`` bytes, or more by less than one step.

        A step are the blocks of one tile of one row. The last size goes for all parts behind it. A
        part that ends with its group before it is full leaves the rest of its size to the next.

        Args:
            layers: the parts come in the order in which the engine needs the layers; None: as they
                lie in the payload.
            ends: places in that order, rising, behind which no part goes on.

        Raises:
            LayoutError: layers that are not those of the groups.
        """
        return cut(self.plan, self._executor.config, sizes, layers, ends)

    @contextmanager
    def queued(self, blocks: Iterable[Sequence[Sequence[int]]], stream: int) -> Iterator[Queue]:
        """Make the block ids of some chunks ready for launches on a stream.

        Args:
            blocks: per chunk and group, the cache's blocks; ``ABSENT`` ones are not written.
            stream: handle; its device must be the current one.

        Yields:
            ``queue(chunk, part, address, sums, total_at, aside)``: launch a part of ``blocks[chunk]``,
            the payload of the chunk beginning at ``address`` (behind which only the part has to be
            there). ``sums`` int64[1, rows + 1] gains the part's share of the fingerprint. A launch
            with ``total_at`` is the last with these sums: it writes their total there and leaves them
            zero. Before a launch on another stream that has to wait for this one, if :attr:`inline` is
            not so.

        Raises:
            LayoutError: ids out of range, destinations named twice, or not as many as a chunk has;
                nothing was launched. From ``queue``: an address that is not aligned.
        """
        unit = self.plan.unit
        with self._executor.queued([self._pairs(chunk) for chunk in blocks], stream) as launch:

            def queue(
                chunk: int,
                part: ChunkPart,
                address: int,
                sums: torch.Tensor,
                total_at: int = 0,
                aside: Aside = None,
            ) -> None:
                if address % unit:
                    raise LayoutError(
                        f"chunk address: expected a multiple of {unit}, got {address}"
                    )
                launch(chunk, part.first_tile, part.end_tile, sums, address, total_at, aside)

            yield queue

    @cached_property
    def step_bytes(self) -> int:
        """The most that lies between two places at which a chunk can be cut."""
        return max(step.nbytes for step in _grains(self.plan, self._executor.config, None))

    @property
    def inline(self) -> bool:
        """Whether launches bring their ids along, and so need not come after any upload."""
        return self._executor.inline(self._blocks[0])

    def _pairs(self, blocks: Sequence[Sequence[int]]) -> list[tuple[memoryview, memoryview]]:
        if len(blocks) != len(self._blocks):
            raise LayoutError(f"ids: expected {len(self._blocks)} groups, got {len(blocks)}")
        pairs = []
        loading = self._chunk_side == "src"
        for index, (ids, chunk, pool) in enumerate(
            zip(blocks, self._chunk_ids, self._pools, strict=True)
        ):
            if len(ids) != len(chunk):
                raise LayoutError(f"ids[{index}]: expected {len(chunk)} blocks, got {len(ids)}")
            cache = pack_ids(ids, pool, f"ids[{index}]", loading)
            pairs.append((cache, chunk) if loading else (chunk, cache))
        return pairs


def pair_planes(
    groups: Sequence[CacheGroup], chunk: Sequence[Sequence[Plane]], chunk_side: Side
) -> list[list[tuple[Plane, Plane]]]:
    """Per group, (destination, source) planes of a cache and a chunk."""
    pairs = [list(zip(c, g.planes, strict=True)) for c, g in zip(chunk, groups, strict=True)]
    return pairs if chunk_side == "dst" else [[pair[::-1] for pair in group] for group in pairs]


def cut(
    plan: CopyPlan,
    config: CopyConfig,
    sizes: Iterable[int],
    layers: Layers | None = None,
    ends: Sequence[int] = (),
) -> list[ChunkPart]:
    """See :meth:`ChunkCopy.cut`. Pure."""
    targets = iter(sizes)
    target = next(targets)
    grains = list(_grains(plan, config, layers))
    if layers is not None:
        grains.sort(key=lambda grain: grain.first_layer)  # stable: of a layer, as they lie
    parts: list[ChunkPart] = []
    first = last = grains[0]
    for grain in grains[1:]:
        ended = bisect_left(ends, last.last_layer) < bisect_left(ends, grain.first_layer)
        size = last.offset + last.nbytes - first.offset
        if last.end_tile != grain.first_tile or size >= target or ended:
            parts.append(_through(first, last))
            target = next(targets, target)
            first = grain
        elif last.group != grain.group:
            parts.append(_through(first, last))
            target -= size
            first = grain
        last = grain
    parts.append(_through(first, last))
    final = {part.group: index for index, part in enumerate(parts)}
    for index in final.values():
        parts[index] = parts[index]._replace(last=True)
    return parts


def _through(first: ChunkPart, last: ChunkPart) -> ChunkPart:
    """Both and what lies between them."""
    return last._replace(
        offset=first.offset,
        nbytes=last.offset + last.nbytes - first.offset,
        first_tile=first.first_tile,
        first_layer=first.first_layer,
    )


def check_layers(layers: Layers, groups: Sequence[CacheGroup]) -> int:
    """The last place in an order of layers.

    Raises:
        LayoutError: layers that are not those of the groups.
    """
    _check_groups(layers, len(groups))
    return max(
        max(_turns(order, plane.rows))
        for order, group in zip(layers, groups, strict=True)
        for plane in group.planes
    )


def _grains(plan: CopyPlan, config: CopyConfig, layers: Layers | None) -> Iterator[ChunkPart]:
    """The smallest parts: the blocks of one tile of one row."""
    if layers is not None:
        _check_groups(layers, plan.groups)
    tile = 0
    for leg in plan.legs:
        chunk = leg.dst if plan.chunk_side == "dst" else leg.src
        tiles = config.tiles(leg.dst, config.blocks, plan.unit) // leg.dst.rows
        turns = (0,) * chunk.rows if layers is None else _turns(layers[leg.group], chunk.rows)
        for place, turn in zip(leg.places, turns, strict=True):
            for first in range(0, chunk.num_blocks, config.blocks):
                blocks = min(config.blocks, chunk.num_blocks - first)
                yield ChunkPart(
                    place + first * chunk.block_bytes,
                    blocks * chunk.block_bytes,
                    tile,
                    tile + tiles,
                    turn,
                    turn,
                    leg.group,
                )
                tile += tiles


def _check_groups(layers: Layers, groups: int) -> None:
    if len(layers) != groups:
        raise LayoutError(f"layers: expected one list a group, {groups}, got {len(layers)}")


def _turns(layers: Sequence[int], rows: int) -> list[int]:
    """Of each row, when the engine needs its layer."""
    if not layers or rows % len(layers):
        raise LayoutError(
            f"layers: expected as many as share {rows} rows evenly, got {len(layers)}"
        )
    return [turn for turn in layers for _ in range(rows // len(layers))]
