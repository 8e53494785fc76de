"""From real tensors to planes: shapes name the axes, strides are read, nothing is recomputed.

A plane holds addresses only: keep the tensors alive while it is used.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from .axes import ROW_WORDS, Axes, row_offsets
from .errors import LayoutError
from .plane import CacheGroup, Plane

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import TypeAlias

    import torch

    Nested: TypeAlias = torch.Tensor | Sequence["Nested"]
    """A tensor, or lists of tensors to any depth."""


def plane_of(tensors: Nested, axes: str, **sizes: int) -> Plane:
    """Describe KV-cache tensors as a plane.

    Args:
        tensors: one tensor, or lists of tensors; all of one shape, stride, dtype and device.
        axes: the meaning of each axis in the order of the shape, for example
            ``"kv block token head dim"``. The physical order is read from the strides.

            - ``block`` must be there. Without ``token`` or ``head`` there is one of each; without
              ``dim`` an element stands alone. ``layer`` and ``kv`` become rows.
            - ``"kv layer | block token head dim"``: lists of lists. Without a bar it is one tensor,
              or a list with one for each layer.
            - ``"(block token) head dim"``: an axis that folds several; sizes take it apart.
            - ``"block head head token dim"``: an axis cut in two whose strides still are those of
              one. Only two block axes may lie apart: ids count through both.
            - ``1``: an axis of extent 1.
        sizes: extents by word, needed for folded axes; of any other word, an extent to insist on.

    Returns:
        A plane whose rows are ordered by layer, then kv.

    Raises:
        LayoutError: axes that cannot be read; tensors that are not what they say, or differ, naming
            shape and strides; a ``dim`` that is not dense.
    """
    read = Axes.parse(axes)
    if "plane" in read.words:
        raise read.error("'plane' makes several planes: describe these tensors by group_of")
    leaves = _leaves(tensors, read, sizes)
    first = leaves[0]
    for leaf in leaves:
        for what, want, got in zip(_Form._fields, first.form, leaf.form, strict=True):
            if want != got:
                raise LayoutError(f"{leaf.name}.{what}: expected {want} as {first.name}, got {got}")
    (plane,) = _planes(leaves, read, sizes)
    return plane


def group_of(tensors: Nested, axes: str, *, tokens_per_state: int = 1, **sizes: int) -> CacheGroup:
    """Describe KV-cache tensors as a group of one or several planes.

    Args:
        tensors, axes, sizes: as for :func:`plane_of`, but tensors may differ in shape, stride and
            dtype: those that are alike make one plane, in order of their first rows. Each entry
            along the axis or list level ``plane`` makes planes of its own, as in
            ``"layer plane | block token dim"``.
        tokens_per_state: tokens that one entry of the token axis stands for, in caches that keep
            one state for several.

    Raises:
        LayoutError: as :func:`plane_of`, and for planes that differ in device or tokens.
    """
    read = Axes.parse(axes)
    leaves = _leaves(tensors, read, sizes)
    planes = _planes(leaves, read, sizes)
    return CacheGroup(
        planes,
        planes[0].block_tokens * tokens_per_state,
        _dtype_names(leaves),
        tokens_per_state=tokens_per_state,
    )


def opaque_group_of(pages: Nested, block_tokens: int, tag: str) -> CacheGroup:
    """A group of pages whose inside is not affine and so only moves whole.

    Args:
        pages: a tensor or lists of them, block axis first; the bytes of each page must be dense, in
            whatever order the page format has them. Unlike tensors, such as the several states of
            recurrent layers, make planes of their own.
        block_tokens: tokens one page stands for.
        tag: names the page format; only pages of an equal tag are interchangeable.

    Raises:
        LayoutError: pages that are not dense, or not all on one device.
    """
    if not tag:
        raise LayoutError("tag: an opaque page format needs a name, got an empty string")
    group = group_of([_flat_page(leaf) for leaf in _flatten(pages)], "block dim")
    return CacheGroup(group.planes, block_tokens, group.dtype, tag)


def blocked_group_of(
    pages: Nested, block_tokens: int, widths: Sequence[int], *, tokens_per_state: int = 1
) -> CacheGroup:
    """A group of pages that hold one array after another, such as all values, then all scales.

    Args:
        pages: a tensor or lists of them, block axis first; the bytes of each page must be dense.
            Bytes behind the last array are padding.
        block_tokens: tokens one page stands for.
        widths: bytes that each of the arrays has for one token.
        tokens_per_state: as for :func:`group_of`; a width is then of one state.

    Returns:
        A group of one plane for each width.

    Raises:
        LayoutError: pages that are not dense, or too small for the arrays.
    """
    import torch

    if tokens_per_state < 1 or block_tokens % tokens_per_state:
        raise LayoutError(
            f"block of {block_tokens} tokens: expected whole states, "
            f"got {tokens_per_state} tokens a state"
        )
    states = block_tokens // tokens_per_state
    if not widths or min(widths) < 1:
        raise LayoutError(f"widths: expected some, all >= 1, got {tuple(widths)}")
    sizes = [states * width for width in widths]
    leaves, layers = list(_flatten(pages)), []
    for leaf in leaves:
        flat = _flat_page(leaf).view(torch.uint8)
        if flat.shape[1] < sum(sizes):
            raise LayoutError(
                f"{leaf.name}: expected pages of at least {sum(sizes)} bytes ({states} times widths "
                f"{tuple(widths)}), got {flat.shape[1]} in {leaf.where}"
            )
        layers.append(flat[:, : sum(sizes)].split(sizes, dim=1))
    group = group_of(
        layers, "layer plane | block (token dim)", tokens_per_state=tokens_per_state, token=states
    )
    return replace(group, dtype=_dtype_names(leaves))


def dtype_name(tensor: torch.Tensor) -> str:
    """``"bfloat16"`` for torch.bfloat16, and so on."""
    return str(tensor.dtype).removeprefix("torch.")


def _dtype_names(leaves: Iterable[_Leaf]) -> str:
    return "+".join(dict.fromkeys(dtype_name(leaf.tensor) for leaf in leaves))


class _Form(NamedTuple):
    """What tensors have in common that make one plane."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class _Leaf(NamedTuple):
    """A tensor, and its place in the lists around it as (word, index) pairs, outermost first."""

    name: str
    place: tuple[tuple[str, int], ...]
    tensor: torch.Tensor
    form: _Form

    @property
    def where(self) -> str:
        return f"shape {self.form.shape} stride {self.form.stride}"


def _leaf(tensor: Nested, name: str, place: tuple[tuple[str, int], ...] = ()) -> _Leaf:
    import torch

    if not isinstance(tensor, torch.Tensor):
        raise LayoutError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}")
    if tensor.layout is not torch.strided or tensor.device.type == "meta":
        raise LayoutError(
            f"{name}: expected bytes in memory, got a {tensor.layout} tensor on {tensor.device}"
        )
    form = _Form(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)
    return _Leaf(name, place, tensor, form)


def _leaves(tensors: Nested, axes: Axes, sizes: Mapping[str, int]) -> list[_Leaf]:
    """The tensors with their places, after checking that the lists are what the axes say."""
    import torch

    axes.check_sizes(sizes)
    levels = axes.levels
    if levels is None:
        levels = () if isinstance(tensors, torch.Tensor) else ("layer",)
    found: list[tuple[Nested, str, tuple[tuple[str, int], ...]]] = [(tensors, "tensors", ())]
    for word in levels:
        outer, found, expected = found, [], sizes.get(word)
        for value, name, place in outer:
            items = _as_list(value, f"{name}: expected a list along {word!r}")
            if expected not in (None, len(items)):
                raise LayoutError(f"{name}: expected {expected} along {word!r}, got {len(items)}")
            expected = len(items)
            found += [(item, f"{name}[{i}]", (*place, (word, i))) for i, item in enumerate(items)]
    return [_leaf(*item) for item in found]


def _flatten(tensors: Nested, name: str = "pages") -> Iterator[_Leaf]:
    import torch

    if isinstance(tensors, torch.Tensor):
        yield _leaf(tensors, name)
        return
    for i, item in enumerate(_as_list(tensors, f"{name}: expected a tensor or a list")):
        yield from _flatten(item, f"{name}[{i}]")


def _as_list(value: Nested, expected: str) -> list[Nested]:
    import torch

    if isinstance(value, torch.Tensor) or not isinstance(value, Iterable):
        raise LayoutError(f"{expected}, got {type(value).__name__}")
    items = list(value)
    if not items:
        raise LayoutError(f"{expected} of at least one, got none")
    return items


def _planes(leaves: list[_Leaf], axes: Axes, sizes: Mapping[str, int]) -> tuple[Plane, ...]:
    """One plane for each index of ``plane`` and form of tensors, in order of their first rows."""
    rows: list[tuple[list[int], _Form, int]] = []
    for leaf in leaves:
        shape, stride, dtype, _ = leaf.form
        for place, offset in row_offsets(axes.unfold(shape, stride, sizes)):
            order = [i for word in ROW_WORDS for w, i in (*leaf.place, *place) if w == word]
            if "kv" in axes.words and order[-1] > 1:
                raise LayoutError(
                    f"{leaf.name}: expected one or two entries of kv ({axes.text!r}), "
                    f"got {leaf.where}"
                )
            rows.append((order, leaf.form, leaf.tensor.data_ptr() + offset * dtype.itemsize))
    rows.sort(key=lambda row: row[0])
    bases: dict[tuple[int, _Form], list[int]] = {}
    for order, form, base in rows:
        bases.setdefault((order[0] if "plane" in axes.words else 0, form), []).append(base)
    return tuple(
        replace(
            axes.plane(form.shape, form.stride, form.dtype.itemsize, sizes),
            bases=tuple(found),
            device=str(form.device),
        )
        for (_, form), found in bases.items()
    )


def _flat_page(leaf: _Leaf) -> torch.Tensor:
    """The page's bytes in the order of memory, as a tensor of (block, bytes behind it)."""
    page = leaf.tensor
    dense = 1
    for stride, extent in sorted(zip(page.stride()[1:], page.shape[1:], strict=True)):
        if extent > 1 and stride != dense:
            raise LayoutError(
                f"{leaf.name}: expected dense bytes behind the block axis, got {leaf.where}"
            )
        dense *= extent
    if page.dim() < 1 or dense < 1:
        raise LayoutError(
            f"{leaf.name}: expected a block axis and bytes behind it, got {leaf.where}"
        )
    return page.as_strided((page.shape[0], dense), (page.stride(0), 1))
