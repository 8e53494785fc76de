"""Copy blocks between planes: the one operation of the bottom layer.

Layout work (compatibility, coalescing, access width, tables, compiling) happens once, in
:func:`prepare_copy`; moving blocks afterwards takes ids only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from .copy_plan import CopyPlan
from .errors import LayoutError
from .ids import pack_ids

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch

    from .copy_plan import Side
    from .ids import IdBuffer
    from .plane import Plane

MAX_LAUNCH_BYTES = 512 << 20
"""Most payload of one launch: 0.25 ms of an H200's memory. Other work gets its turn between two."""


def copy_blocks(
    dst: Plane,
    dst_ids: Iterable[int],
    src: Plane,
    src_ids: Iterable[int],
    *,
    max_programs: int | None = None,
) -> None:
    """``dst[row, dst_ids[i], t, h, :] = src[row, src_ids[i], t, h, :]`` for every row, t, h, i.

    Bytes move as they are, whatever they mean. On a GPU the copy is queued on the current stream of
    the source's device and this returns at once; in host memory it is done on return. Source and
    destination must not overlap; of one and the same plane that is checked.

    Args:
        dst, src: planes of equal rows, tokens, heads and width; strides are free. On one device, or
            on two GPUs of which the source's reaches the other's memory.
        dst_ids, src_ids: block ids, pairwise; no destination twice. A destination of ``ABSENT``
            (-1) leaves its block out.
        max_programs: bound on the GPU grid, to leave the model its multiprocessors.

    Raises:
        LayoutError: planes that do not fit, devices that do not reach each other, bad ids, or
            blocks of one plane that are both read and written; nothing was written.
    """
    prepare_copy(dst, src, max_programs=max_programs).copy(dst_ids, src_ids)


def prepare_copy(
    dst: Plane,
    src: Plane,
    *,
    max_programs: int | None = None,
    max_launch_bytes: int = MAX_LAUNCH_BYTES,
    run_on: str | None = None,
) -> PreparedCopy:
    """Do the layout work of :func:`copy_blocks` once; same arguments and errors, and:

    Args:
        max_launch_bytes: most payload of one launch; a larger copy takes several.
        run_on: which of the planes' devices copies: the source's, which pushes (default), or the
            destination's, which pulls.
    """
    return PreparedCopy(
        [[(dst, src)]],
        max_programs=max_programs,
        max_launch_bytes=max_launch_bytes,
        run_on=run_on,
    )


class Executor(Protocol):
    """Carries out a plan for checked ids: per group a destination and a source list."""

    def copy(self, ids: Sequence[tuple[IdBuffer, IdBuffer]], sums: torch.Tensor | None) -> None: ...


class PreparedCopy:
    """Groups of plane pairs made ready for :meth:`copy`; each group has its own block ids.

    Keep the tensors behind the planes alive. Use one from one thread at a time.

    Args:
        groups: per group of block ids, (destination, source) planes.
        chunk_side: which side holds whole chunks, one an outer step of its planes, whose
            fingerprints are added to ``sums``. A payload begins at the lowest base.
        max_programs, max_launch_bytes, run_on: see :func:`prepare_copy`.

    Raises:
        LayoutError: see :func:`copy_blocks`.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[tuple[Plane, Plane]]],
        *,
        chunk_side: Side | None = None,
        max_programs: int | None = None,
        max_launch_bytes: int = MAX_LAUNCH_BYTES,
        run_on: str | None = None,
    ) -> None:
        for name, bound in (("max_programs", max_programs), ("max_launch_bytes", max_launch_bytes)):
            if bound is not None and (not isinstance(bound, int) or bound < 1):
                raise LayoutError(f"{name}: expected an integer >= 1, got {bound}")
        self.plan = CopyPlan.of(groups, chunk_side)
        self.device = _device_that_copies(self.plan, run_on)
        self._limits = [_Limits.of(self.plan, group) for group in range(len(groups))]
        self._executor = _executor(self.plan, self.device, max_programs, max_launch_bytes)

    def copy(
        self,
        dst_ids: Iterable[int],
        src_ids: Iterable[int],
        *,
        sums: torch.Tensor | None = None,
    ) -> None:
        """:meth:`copy_groups` of the only group."""
        self.copy_groups(((dst_ids, src_ids),), sums=sums)

    def copy_groups(
        self,
        ids: Sequence[tuple[Iterable[int], Iterable[int]]],
        *,
        sums: torch.Tensor | None = None,
    ) -> None:
        """Copy the blocks named, per group by destination and source ids; see :func:`copy_blocks`.

        Args:
            ids: a pair of lists a group. Where groups share memory, that no block of one is a
                destination in another is the caller's to see to.
            sums: with a ``chunk_side``: int64[chunks, rows] on the device that copies; each entry
                gains, modulo 2**64, what that row of that chunk adds to the chunk's fingerprint.
                Of source chunks that includes blocks that are left out.

        Raises:
            LayoutError: an id out of range, a destination named twice, lists of other lengths, or
                ``sums`` that do not fit; nothing was written.
        """
        if len(ids) != len(self._limits):
            raise LayoutError(f"ids: expected {len(self._limits)} groups, got {len(ids)}")
        packed = []
        for (dst_ids, src_ids), (name, dst_blocks, src_blocks, same_place) in zip(
            ids, self._limits, strict=True
        ):
            to = pack_ids(dst_ids, dst_blocks, name + "dst_ids", True)
            origin = pack_ids(src_ids, src_blocks, name + "src_ids", False)
            if len(to) != len(origin):
                raise LayoutError(
                    f"{name}ids: expected as many destination as source blocks, "
                    f"got {len(to)} and {len(origin)}"
                )
            if same_place:
                _check_apart(to, origin)
            packed.append((to, origin))
        if sums is not None or self.plan.chunk_side is not None:
            self._check_sums(sums)
        self._executor.copy(packed, sums)

    def _check_sums(self, sums: torch.Tensor | None) -> None:
        if sums is None or self.plan.chunk_side is None:
            raise LayoutError("sums: expected exactly where the copy has a chunk side")
        import torch

        chunks = max(getattr(leg, self.plan.chunk_side).outer_blocks for leg in self.plan.legs)
        if (
            sums.dtype != torch.int64
            or sums.dim() != 2
            or sums.shape[0] < chunks
            or sums.shape[1] != self.plan.rows
            or not sums.is_contiguous()
            or str(sums.device) != self.device
        ):
            raise LayoutError(
                f"sums: expected contiguous int64 [{chunks}, {self.plan.rows}] on {self.device}, "
                f"got {sums.dtype} {list(sums.shape)} of stride {sums.stride()} on {sums.device}"
            )


class _Limits(NamedTuple):
    """What the ids of one group may be, and what to call them."""

    name: str
    dst_blocks: int
    src_blocks: int
    same_place: bool

    @classmethod
    def of(cls, plan: CopyPlan, group: int) -> _Limits:
        dst, src = plan.planes(group, "dst"), plan.planes(group, "src")
        return cls(
            f"groups[{group}]." if plan.groups > 1 else "",
            min(plane.num_blocks for plane in dst),
            min(plane.num_blocks for plane in src),
            any(to.bases == origin.bases for to in dst for origin in src),
        )


def _check_apart(dst_ids: IdBuffer, src_ids: IdBuffer) -> None:
    both = set(dst_ids).intersection(src_ids)
    if both:
        raise LayoutError(
            f"blocks {sorted(both)[:8]} are read and written by one copy of one plane"
        )


def _device_that_copies(plan: CopyPlan, run_on: str | None) -> str:
    dst, src = plan.legs[0].dst.device, plan.legs[0].src.device
    device = src if run_on is None else run_on
    if device not in (dst, src):
        expected = " or ".join(dict.fromkeys((dst, src)))
        raise LayoutError(f"run_on: expected {expected}, got {device}")
    if dst != src and "cpu" in (dst, src):
        raise LayoutError(
            f"planes lie on different devices: destination on {dst}, source on {src}; "
            "stage one of them"
        )
    if device != "cpu":
        from .devices import check_present, enable_peer_access

        check_present(device)
        if dst != src:
            enable_peer_access(device, dst if device == src else src)
    return device


def _executor(
    plan: CopyPlan, device: str, max_programs: int | None, max_launch_bytes: int
) -> Executor:
    if device == "cpu":
        from .devices import interpreting

        if not interpreting():
            from .host_copy import HostCopy

            return HostCopy(plan)
    from .kernel_copy import KernelCopy

    return KernelCopy(plan, device, max_programs=max_programs, max_launch_bytes=max_launch_bytes)
