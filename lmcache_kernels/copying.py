"""Copy blocks between two planes: the one operation of the bottom layer.

Layout work (compatibility, coalescing, access width, tables) happens once, in
:func:`prepare_copy`; moving blocks afterwards takes ids only.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from .copy_config import choose_config
from .errors import LayoutError
from .ids import as_ids, check_ids, check_pairing
from .plane import Plane, access_unit, check_compatible, coalesce

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from .copy_config import CopyConfig


def copy_blocks(
    dst: Plane,
    dst_ids: Sequence[int],
    src: Plane,
    src_ids: Sequence[int],
    *,
    max_programs: int | None = None,
) -> None:
    """``dst[row, dst_ids[i], t, h, :] = src[row, src_ids[i], t, h, :]`` for every row, t, h, i.

    Bytes move as they are, whatever they mean. On a GPU the copy is queued on torch's current
    stream and this returns at once; in host memory it is done on return. Source and destination
    must not overlap; of one and the same plane that is checked.

    Args:
        dst, src: planes of equal rows, tokens, heads and width on one device; strides are free.
        dst_ids, src_ids: block ids, pairwise; no destination twice.
        max_programs: bound on the GPU grid, to leave the model its multiprocessors.

    Raises:
        LayoutError: planes that do not fit, other devices, bad ids, or blocks of one plane that are
            both read and written; nothing was written.
    """
    prepare_copy(dst, src, max_programs=max_programs).copy(dst_ids, src_ids)


def prepare_copy(dst: Plane, src: Plane, *, max_programs: int | None = None) -> PreparedCopy:
    """Do the layout work of :func:`copy_blocks` once; same arguments and errors."""
    return PreparedCopy(dst, src, max_programs=max_programs)


class PreparedCopy:
    """Two planes made ready for :meth:`copy`. Made by :func:`prepare_copy`."""

    def __init__(self, dst: Plane, src: Plane, *, max_programs: int | None = None) -> None:
        check_compatible(dst, src)
        if dst.device != src.device:
            raise LayoutError(
                f"planes lie on different devices: destination on {dst.device}, "
                f"source on {src.device}; stage one of them"
            )
        if max_programs is not None and max_programs < 1:
            raise LayoutError(f"max_programs: expected >= 1, got {max_programs}")
        self._dst, self._src = coalesce(dst, src)
        self._same_place = dst.bases == src.bases
        self._unit = access_unit(self._dst, self._src)
        self._on_host = dst.device == "cpu" and not interpreting()
        if not self._on_host:
            self._config: CopyConfig = choose_config(self._dst, self._unit, max_programs)
            self._dst_bases = _table(self._dst)
            self._src_bases = _table(self._src)

    def copy(self, dst_ids: Sequence[int], src_ids: Sequence[int]) -> None:
        """Copy the blocks named; see :func:`copy_blocks`.

        Raises:
            LayoutError: an id out of range, a destination named twice, or lists of other lengths.
        """
        dst_ids = as_ids(dst_ids, name="dst_ids")
        src_ids = as_ids(src_ids, name="src_ids")
        check_pairing(dst_ids, src_ids)
        check_ids(dst_ids, self._dst.num_blocks, name="dst_ids", unique=True)
        check_ids(src_ids, self._src.num_blocks, name="src_ids")
        if self._same_place and not set(dst_ids).isdisjoint(src_ids):
            both = sorted(set(dst_ids).intersection(src_ids))
            raise LayoutError(f"blocks {both[:8]} are read and written by one copy of one plane")
        if not dst_ids:
            return
        if self._on_host:
            from .host_copy import copy_blocks_host

            copy_blocks_host(self._dst, dst_ids, self._src, src_ids, unit=self._unit)
        else:
            self._launch(dst_ids, src_ids)

    def _launch(self, dst_ids: Sequence[int], src_ids: Sequence[int]) -> None:
        from .copy_kernel import launch_block_copy

        ids = _upload([*dst_ids, *src_ids], self._dst.device)
        launch_block_copy(
            self._dst,
            self._dst_bases,
            ids[: len(dst_ids)],
            self._src,
            self._src_bases,
            ids[len(dst_ids) :],
            unit=self._unit,
            config=self._config,
        )


def interpreting() -> bool:
    """True when Triton runs its kernels on the CPU (``TRITON_INTERPRET=1``)."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def _table(plane: Plane) -> torch.Tensor:
    import torch

    table = torch.tensor(plane.bases, dtype=torch.int64).to(plane.device)
    if table.is_cuda:
        # The table outlives this stream's order: a later copy may run on another stream.
        torch.cuda.current_stream(table.device).synchronize()
    return table


def _upload(ids: list[int], device: str) -> torch.Tensor:
    import torch

    if device == "cpu":
        return torch.tensor(ids, dtype=torch.int64)
    # Pinned memory makes the upload asynchronous; torch's host allocator keeps it until then.
    return torch.tensor(ids, dtype=torch.int64, pin_memory=True).to(device, non_blocking=True)
