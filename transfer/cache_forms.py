"""What another process must know to read and to name a KV cache, as data. Pure.

A form says what the axes of some tensors mean, and is one call of :mod:`lmcache_kernels.views`:
:class:`AxesForm` of ``group_of``, :class:`PagesForm` of ``opaque_group_of``, :class:`ArraysForm` of
``blocked_group_of``. Every value is checked when a struct is made, so also when one is decoded.
"""

from __future__ import annotations

import math
from collections import Counter
from itertools import chain
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from lmcache_kernels.axes import ROW_WORDS, Axes
from lmcache_kernels.errors import LayoutError
from lmcache_kernels.plane import CacheGroup
from lmcache_kernels.views import blocked_group_of, group_of, opaque_group_of

from .keys import shard_id
from .sharing.descriptors import MAX_TENSORS, TensorDescriptor

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from lmcache_kernels.views import Nested

MAX_TEXT = 512
"""Characters of an axes string, of a format and of a layer's name."""

MAX_NUMBER = 1 << 31
"""Of tokens, widths and extents; block ids have as many bits."""

MAX_ROWS = 1 << 14
"""Rows of one cache: 4096 layers with K and V, twice."""

MAX_PARTS = 64
"""Groups of a cache, pieces of a group, arrays of a page, words with a size, levels of lists."""


class _Data(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class AxesForm(_Data, frozen=True, kw_only=True, tag_field="form", tag="axes"):
    """Tensors with axes: see :func:`lmcache_kernels.views.group_of`."""

    axes: str
    sizes: dict[str, int] = {}
    tokens_per_state: int = 1

    def __post_init__(self) -> None:
        _check_text("axes", self.axes)
        _check_count("sizes", len(self.sizes), MAX_PARTS)
        _check_numbers("sizes", self.sizes.values())
        _check_numbers("tokens_per_state", [self.tokens_per_state])
        Axes.parse(self.axes).check_sizes(self.sizes)


class PagesForm(_Data, frozen=True, kw_only=True, tag_field="form", tag="pages"):
    """Pages that only move whole: see :func:`lmcache_kernels.views.opaque_group_of`."""

    block_tokens: int
    format: str

    def __post_init__(self) -> None:
        _check_text("format", self.format)
        _check_numbers("block_tokens", [self.block_tokens])


class ArraysForm(_Data, frozen=True, kw_only=True, tag_field="form", tag="arrays"):
    """Pages of arrays: see :func:`lmcache_kernels.views.blocked_group_of`."""

    block_tokens: int
    widths: tuple[int, ...]
    tokens_per_state: int = 1

    def __post_init__(self) -> None:
        _check_count("widths", len(self.widths), MAX_PARTS)
        _check_numbers("widths", self.widths)
        _check_numbers("block_tokens", [self.block_tokens])
        _check_numbers("tokens_per_state", [self.tokens_per_state])


Form: TypeAlias = AxesForm | PagesForm | ArraysForm


class SharedPiece(_Data, frozen=True, kw_only=True):
    """Tensors that are read in one form; a group is one piece or, if they are unlike, several.

    Attributes:
        tensors: in the order in which the lists around them hold them.
        lists: how many each level of lists holds, outermost first; none around a single tensor.

    Raises:
        LayoutError: tensors that are not what the form says.
    """

    tensors: tuple[TensorDescriptor, ...]
    lists: tuple[int, ...]
    form: Form

    def __post_init__(self) -> None:
        _check_count("lists", len(self.lists), MAX_PARTS)
        _check_count("tensors", len(self.tensors), MAX_TENSORS)
        if not self.tensors or math.prod(self.lists) != len(self.tensors):
            raise LayoutError(
                f"tensors: expected one for each of lists {self.lists}, got {len(self.tensors)}"
            )
        _check_count("rows", self.rows, MAX_ROWS)

    @property
    def rows(self) -> int:
        """Of all its planes together: what reading it costs."""
        if isinstance(self.form, PagesForm):
            return len(self.tensors)
        if isinstance(self.form, ArraysForm):
            return len(self.tensors) * len(self.form.widths)
        axes = Axes.parse(self.form.axes)
        rows = 0
        for (shape, strides), count in Counter((t.shape, t.strides) for t in self.tensors).items():
            unfolded = axes.unfold(shape, strides, self.form.sizes)
            rows += count * math.prod(axis.extent for axis in unfolded if axis.word in ROW_WORDS)
        return rows


class ShardPart(_Data, frozen=True, kw_only=True):
    """Which part of a model's cache a worker holds: the arguments of :func:`.keys.shard_id`."""

    index: int = 0
    count: int = 1
    stage: int = 0
    stages: int = 1
    layers: tuple[tuple[str, ...], ...] = ()

    def __post_init__(self) -> None:
        _check_count("layers", len(self.layers), MAX_PARTS)
        _check_count("layers", sum(map(len, self.layers)), MAX_ROWS)
        for name in chain(*self.layers):
            _check_text("layers", name)

    def shard(self, fingerprint: bytes) -> bytes:
        """The shard id, given the layout's fingerprint.

        Raises:
            ConfigError: an index that is not below its count.
        """
        return shard_id(
            fingerprint,
            index=self.index,
            count=self.count,
            stage=self.stage,
            stages=self.stages,
            layers=self.layers,
        )


def read_group(pieces: Sequence[tuple[Nested, Form]]) -> CacheGroup:
    """The group that some tensors are, each piece in its form. Planes are in order of the pieces.

    Raises:
        LayoutError: tensors that are not what their form says, or pieces that do not go together.
    """
    groups = [_read(tensors, form) for tensors, form in pieces]
    if not groups:
        raise LayoutError("group: expected at least one piece, got none")
    first = groups[0]
    for other in groups[1:]:
        for what in ("block_tokens", "opaque", "tokens_per_state"):
            want, got = getattr(first, what), getattr(other, what)
            if want != got:
                raise LayoutError(f"pieces of a group: expected one {what}, got {want} and {got}")
    return CacheGroup(
        tuple(chain(*(group.planes for group in groups))),
        first.block_tokens,
        first.dtype,
        first.opaque,
        first.tokens_per_state,
    )


def _read(tensors: Nested, form: Form) -> CacheGroup:
    if isinstance(form, AxesForm):
        return group_of(tensors, form.axes, tokens_per_state=form.tokens_per_state, **form.sizes)
    if isinstance(form, PagesForm):
        return opaque_group_of(tensors, form.block_tokens, form.format)
    return blocked_group_of(
        tensors, form.block_tokens, form.widths, tokens_per_state=form.tokens_per_state
    )


def _check_text(what: str, text: str) -> None:
    if not isinstance(text, str):
        raise LayoutError(f"{what}: expected words, got {type(text).__name__}")
    if not 0 < len(text) <= MAX_TEXT:
        raise LayoutError(f"{what}: expected 1 to {MAX_TEXT} characters, got {len(text)}")


def _check_count(what: str, count: int, most: int) -> None:
    if count > most:
        raise LayoutError(f"{what}: expected at most {most}, got {count}")


def _check_numbers(what: str, numbers: Iterable[int]) -> None:
    for number in numbers:
        if not 0 < number <= MAX_NUMBER:
            raise LayoutError(f"{what}: expected 1 to {MAX_NUMBER}, got {number}")
