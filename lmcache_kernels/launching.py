"""Launches the block-copy kernel: compiled once, then without Triton's per-call argument analysis.

Triton's ordinary launch costs the host 16 to 29 us, this one 5 to 6 (H200, torch 2.11, Triton 3.6,
30 November 2026). Under ``TRITON_INTERPRET=1`` the same kernel runs on the CPU.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

import torch

from .copy_config import MAX_GRID
from .copy_kernel import WORDS, block_copy_kernel
from .copy_tables import INLINE_IDS

if TYPE_CHECKING:
    from .copy_config import CopyConfig


class Launch(Protocol):
    """Queue tiles ``first`` to ``end`` of a copy, its chunk side moved by ``shift`` bytes.

    ``total_at``: of what the kernel so calls. ``most``: bound on the grid, beside that of the copy.

    Its ids are ``inline``, the number of pairs and then INLINE_IDS destinations and sources, or else
    stand at the address ``call``. The interpreter takes a tensor for that, and ignores the stream.
    """

    def __call__(
        self,
        call: Any,
        inline: tuple[int, ...],
        stream: int,
        first: int,
        end: int,
        sums: torch.Tensor | None,
        shift: int = 0,
        total_at: int = 0,
        most: int = MAX_GRID,
    ) -> None: ...


NOT_INLINE = (0,) * (1 + 2 * INLINE_IDS)


def constants_of(
    *,
    leg_slots: int,
    unit: int,
    config: CopyConfig,
    fingerprint: int,
    staged: bool,
    writes: bool,
    inline: bool,
) -> dict[str, Any]:
    """What a binary is compiled for. No stride and no size is among it.

    Args:
        leg_slots: legs, rounded up to a power of two.
        unit: bytes of one access.
        fingerprint: 0 none, 1 of the destination's chunks, 2 of the source's.
        staged: whether the chunk side is a slice that shall stay in the L2 cache.
        writes: False to make fingerprints only.
        inline: whether ids come as arguments.
    """
    return {
        "WORD": WORDS[unit],
        "WORD_BYTES": min(unit, 4),
        "UNIT": unit,
        "LEGS": leg_slots,
        "BLOCKS": config.blocks,
        "TOKENS": config.tokens,
        "HEADS": config.heads,
        "UNITS": config.units,
        "FINGERPRINT": fingerprint,
        "STAGED": staged,
        "WRITES": writes,
        "INLINE": inline,
    }


def launcher(
    legs: torch.Tensor,
    rows: torch.Tensor,
    num_rows: int,
    constants: dict[str, Any],
    config: CopyConfig,
) -> Launch:
    """The kernel made ready for two tables; compiles it if need be.

    Args:
        legs, rows: int64, see copy_tables; on the device that runs the copy. The caller keeps them
            alive.
        num_rows: of all legs.
        constants: see :func:`constants_of`.
        config: number of warps and of programs.
    """
    make = _compiled if legs.is_cuda else _interpreted
    return make(legs, rows, num_rows, constants, config)


def _interpreted(
    legs: torch.Tensor,
    rows: torch.Tensor,
    num_rows: int,
    constants: dict[str, Any],
    config: CopyConfig,
) -> Launch:
    def launch(
        call: Any,
        inline: tuple[int, ...],
        stream: int,
        first: int,
        end: int,
        sums: torch.Tensor | None,
        shift: int = 0,
        total_at: int = 0,
        most: int = MAX_GRID,
    ) -> None:
        block_copy_kernel[(min(end - first, config.programs, most),)](
            legs if isinstance(call, int) else call,
            legs,
            rows,
            legs if sums is None else sums,
            num_rows,
            shift,
            total_at,
            first,
            end,
            *inline,
            **constants,
        )

    return launch


def _compiled(
    legs: torch.Tensor,
    rows: torch.Tensor,
    num_rows: int,
    constants: dict[str, Any],
    config: CopyConfig,
) -> Launch:
    kernel = _kernel(legs.device.index, config.num_warps, tuple(constants.items()))
    run, function, metadata = kernel.run, kernel.function, kernel.packed_metadata
    legs_at, rows_at = legs.data_ptr(), rows.data_ptr()
    programs, values = config.programs, tuple(constants.values())

    def launch(
        call: Any,
        inline: tuple[int, ...],
        stream: int,
        first: int,
        end: int,
        sums: torch.Tensor | None,
        shift: int = 0,
        total_at: int = 0,
        most: int = MAX_GRID,
    ) -> None:
        # Pointers as numbers, and no hooks: what Triton would look up anew for every launch.
        run(
            min(end - first, programs, most),
            1,
            1,
            stream,
            function,
            metadata,
            None,
            None,
            None,
            call,
            legs_at,
            rows_at,
            0 if sums is None else sums.data_ptr(),
            num_rows,
            shift,
            total_at,
            first,
            end,
            *inline,
            *values,
        )

    return launch


@cache
def _kernel(device: int, num_warps: int, constants: tuple[tuple[str, Any], ...]) -> Any:
    """The compiled kernel, loaded on a device."""
    with torch.cuda.device(device):
        kernel = block_copy_kernel.warmup(
            torch.int32,
            torch.int64,
            torch.int64,
            torch.int64,
            1,
            0,
            0,
            0,
            1,
            *NOT_INLINE,
            grid=(1,),
            num_warps=num_warps,
            **dict(constants),
        )
        kernel.run  # noqa: B018 - loads the binary, here and not in the first copy
    return kernel
