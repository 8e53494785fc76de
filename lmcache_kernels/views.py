"""From real tensors to planes: shapes name the axes, strides are read, nothing is recomputed."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from .errors import LayoutError
from .plane import CacheGroup, Plane

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

INNER_AXES = ("block", "token", "head", "dim")
"""Axes a plane keeps. ``dim`` is dense; a missing token or head axis has extent 1."""

OUTER_AXES = ("layer", "kv")
"""Axes that become rows, slowest first."""


def plane_of(tensors: torch.Tensor | Sequence[torch.Tensor], axes: str) -> Plane:
    """Describe KV-cache tensors as a plane.

    Args:
        tensors: one tensor, or one for each layer; all of one shape, stride, dtype and device. The
            plane holds addresses only: keep the tensors alive while it is used.
        axes: the meaning of each dimension, slowest first as the shape has it, for example
            ``"kv block token head dim"``. Words: block, token, head, dim, layer, kv. ``block``
            and ``dim`` must be there. The physical order is read from the strides.

    Returns:
        A plane whose rows are ordered by tensor, then layer, then kv.

    Raises:
        LayoutError: unknown, missing or repeated axis; rank, shape, stride, dtype or device that do
            not fit, naming them; last axis not dense.
    """
    items = _as_list(tensors)
    names = axes.split()
    _check_axes(names, axes)
    first = items[0]
    _check_tensors(items, names, axes)

    element = first.element_size()
    shape = dict(zip(names, first.shape, strict=True))
    stride = {n: s * element for n, s in zip(names, first.stride(), strict=True)}
    width = shape["dim"] * element
    outer = [axis for axis in OUTER_AXES if axis in shape]
    bases = tuple(
        item.data_ptr() + sum(i * stride[a] for a, i in zip(outer, index, strict=True))
        for item in items
        for index in itertools.product(*(range(shape[a]) for a in outer))
    )
    return Plane(
        bases=bases,
        num_blocks=shape["block"],
        block_tokens=shape.get("token", 1),
        num_heads=shape.get("head", 1),
        width=width,
        block_stride=stride["block"],
        token_stride=stride.get("token", width),
        head_stride=stride.get("head", width),
        device=str(first.device),
    )


def group_of(tensors: torch.Tensor | Sequence[torch.Tensor], axes: str) -> CacheGroup:
    """The one-plane group that :func:`plane_of` describes; same arguments and errors."""
    plane = plane_of(tensors, axes)
    return CacheGroup((plane,), plane.block_tokens, dtype_name(_as_list(tensors)[0]))


def opaque_group_of(pages: Sequence[torch.Tensor], block_tokens: int, tag: str) -> CacheGroup:
    """A group of pages whose inside is not affine and so only moves whole.

    Args:
        pages: one tensor for each layer, block axis first; the bytes of ``pages[l][b]`` must be
            dense, in whatever order the page format has them.
        block_tokens: tokens one page stands for.
        tag: names the page format; only pages of an equal tag are interchangeable.

    Raises:
        LayoutError: pages that are not dense, or differ in shape, stride, dtype or device.
    """
    if not tag:
        raise LayoutError("tag: an opaque page format needs a name, got an empty string")
    flat = [_flat_page(page) for page in pages]
    if not flat:
        raise LayoutError("pages: expected at least one layer, got none")
    return CacheGroup((plane_of(flat, "block dim"),), block_tokens, dtype_name(pages[0]), tag)


def dtype_name(tensor: torch.Tensor) -> str:
    """``"bfloat16"`` for torch.bfloat16, and so on."""
    return str(tensor.dtype).removeprefix("torch.")


def _as_list(tensors: torch.Tensor | Sequence[torch.Tensor]) -> list[torch.Tensor]:
    import torch

    items = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    if not items:
        raise LayoutError("tensors: expected at least one, got none")
    for index, item in enumerate(items):
        if not isinstance(item, torch.Tensor):
            raise LayoutError(
                f"tensors[{index}]: expected a torch.Tensor, got {type(item).__name__}"
            )
    return items


def _flat_page(page: torch.Tensor) -> torch.Tensor:
    dims = sorted((s, n) for n, s in zip(page.shape[1:], page.stride()[1:], strict=True) if n > 1)
    dense = 1
    for stride, extent in dims:
        if stride != dense:
            raise LayoutError(
                f"opaque page: expected dense bytes behind the block axis, "
                f"got shape {tuple(page.shape)} stride {page.stride()}"
            )
        dense *= extent
    return page.as_strided((page.shape[0], dense), (page.stride(0), 1))


def _check_axes(names: list[str], axes: str) -> None:
    known = (*INNER_AXES, *OUTER_AXES)
    for name in names:
        if name not in known:
            raise LayoutError(f"axes {axes!r}: unknown axis {name!r}, known are {' '.join(known)}")
        if names.count(name) > 1:
            raise LayoutError(f"axes {axes!r}: axis {name!r} named twice")
    for name in ("block", "dim"):
        if name not in names:
            raise LayoutError(f"axes {axes!r}: axis {name!r} is missing")


def _check_tensors(items: list[torch.Tensor], names: list[str], axes: str) -> None:
    first = items[0]
    where = f"shape {tuple(first.shape)} stride {first.stride()}"
    if first.dim() != len(names):
        raise LayoutError(f"tensor: expected {len(names)} axes ({axes!r}), got {where}")
    if 0 in first.shape:
        raise LayoutError(f"tensor: expected no empty axis ({axes!r}), got {where}")
    if "kv" in names and first.shape[names.index("kv")] > 2:
        raise LayoutError(f"tensor: expected one or two entries of kv ({axes!r}), got {where}")
    dim = names.index("dim")
    if first.shape[dim] > 1 and first.stride(dim) != 1:
        raise LayoutError(f"tensor: expected a dense dim axis ({axes!r}), got {where}")
    if first.device.type == "meta":
        raise LayoutError("tensor: a meta tensor has no bytes to move")
    for index, item in enumerate(items):
        for what in ("shape", "dtype", "device"):
            if getattr(item, what) != getattr(first, what):
                raise LayoutError(
                    f"tensors[{index}].{what}: expected {getattr(first, what)} as tensors[0], "
                    f"got {getattr(item, what)}"
                )
        if item.stride() != first.stride():
            raise LayoutError(
                f"tensors[{index}].stride: expected {first.stride()} as tensors[0], "
                f"got {item.stride()}"
            )
