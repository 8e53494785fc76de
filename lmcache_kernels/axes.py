"""The notation that says what the axes of a cache mean: ``"kv layer | (block token) head dim"``.

::

    axes  = [ level ... "|" ] axis ...
    level = word                        lists around the tensors, outermost first
    axis  = word | "1" | "(" word ... ")"

The axes of a tensor are named in the order of its shape. Parentheses hold the words that one axis
folds together, slowest first; ``1`` is an axis of extent 1 without a meaning. Pure: what comes in
are shapes and strides, what comes out is a plane over address 0.
"""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from .errors import LayoutError
from .plane import Plane

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

ROW_WORDS = ("plane", "layer", "kv")
"""Axes and list levels that tell rows apart, slowest first. Rows may lie anywhere."""

PLANE_WORDS = ("block", "token", "head", "dim")
"""Axes that a plane keeps. One that is named several times is joined again by its strides."""

_AXIS = re.compile(r"\(([^()]*)\)|([^\s()]+)")


class Axis(NamedTuple):
    """``extent`` things that lie ``stride`` elements apart."""

    word: str
    extent: int
    stride: int


@dataclass(frozen=True, slots=True)
class Axes:
    """An axes string, read.

    Attributes:
        text: as it was written.
        levels: words in front of the bar; None where there is no bar.
        folds: for each axis of the tensor, the words that it folds together; mostly one.
    """

    text: str
    levels: tuple[str, ...] | None
    folds: tuple[tuple[str, ...], ...]

    @classmethod
    def parse(cls, text: str) -> Axes:
        """Read an axes string.

        Raises:
            LayoutError: no string, brackets or bars that do not fit, or a word that is unknown, missing, in a
                place where it has no meaning, or named too often.
        """
        if not isinstance(text, str):
            raise LayoutError(
                f"axes: expected words such as 'kv block token head dim', got {type(text).__name__}"
            )
        front, bar, back = text.rpartition("|")
        folds = tuple(tuple(" ".join(pair).split()) for pair in _AXIS.findall(back))
        axes = cls(text, tuple(front.split()) if bar else None, folds)
        if _AXIS.sub("", back).strip() or () in folds:
            raise axes.error("expected words, and pairs of parentheses around words")
        axes._check_words()
        return axes

    @property
    def words(self) -> list[str]:
        """Every word in order, those of the list levels first."""
        return [*(self.levels or ()), *itertools.chain(*self.folds)]

    def check_sizes(self, sizes: Mapping[str, int]) -> None:
        """Raise LayoutError unless each size is an integer of at least 1 and of a word that is named once."""
        for word, size in sizes.items():
            if self.words.count(word) != 1:
                raise self.error(f"a size is given for {word!r}, which is not named exactly once")
            if not isinstance(size, int) or size < 1:
                raise self.error(f"size of {word!r}: expected an integer >= 1, got {size!r}")

    def unfold(
        self, shape: Sequence[int], strides: Sequence[int], sizes: Mapping[str, int]
    ) -> list[Axis]:
        """The axes of a tensor in order of the words, folded ones taken apart.

        Args:
            shape, strides: of the tensor, in elements.
            sizes: extents by word: those that a folded axis cannot say itself, and any other to
                insist on.

        Raises:
            LayoutError: a rank that is not the number of axes, an empty axis, or an extent that is
                not what the sizes say; shape and strides are named.
        """
        where = self._where(shape, strides)
        if len(shape) != len(self.folds):
            raise LayoutError(f"tensor: expected {len(self.folds)} axes {where}")
        if 0 in shape:
            raise LayoutError(f"tensor: expected no empty axis {where}")
        known = {**sizes, "1": 1}
        found: list[Axis] = []
        for words, extent, stride in zip(self.folds, shape, strides, strict=True):
            open_words = [word for word in words if word not in known]
            if len(open_words) > 1:
                raise self.error(f"({' '.join(words)}): expected the sizes of all but one of these")
            rest, odd = divmod(extent, math.prod(known.get(word, 1) for word in words))
            if odd or (rest > 1 and not open_words):
                folded = " x ".join(f"{word}={known.get(word, '?')}" for word in words)
                raise LayoutError(f"tensor: expected an axis of {folded} and not {extent} {where}")
            extents = [known.get(word, rest) for word in words]
            found += [
                Axis(word, extents[i], stride * math.prod(extents[i + 1 :]))
                for i, word in enumerate(words)
            ]
        return found

    def plane(
        self, shape: Sequence[int], strides: Sequence[int], itemsize: int, sizes: Mapping[str, int]
    ) -> Plane:
        """The plane of a tensor at address 0, in bytes, with one row; arguments as for unfold.

        Raises:
            LayoutError: as :meth:`unfold`; axes that do not join; a ``dim`` that is not dense.
        """
        where = self._where(shape, strides)
        unfolded = self.unfold(shape, strides, sizes)
        joined = {w: _join([a for a in unfolded if a.word == w]) for w in PLANE_WORDS}
        for word, axes in joined.items():
            if len(axes) > (2 if word == "block" else 1):
                raise LayoutError(f"tensor: expected strides that make one axis of {word} {where}")
        dim = _only(joined["dim"], stride=1)
        if dim.extent > 1 and dim.stride != 1:
            raise LayoutError(f"tensor: expected a dense dim axis {where}")
        width = dim.extent * itemsize
        block, split = joined["block"][0], _only(joined["block"][1:], stride=0)
        token, head = (_only(joined[word], stride=dim.extent) for word in ("token", "head"))
        return Plane(
            bases=(0,),
            num_blocks=block.extent * split.extent,
            block_tokens=token.extent,
            num_heads=head.extent,
            width=width,
            block_stride=block.stride * itemsize,
            token_stride=token.stride * itemsize,
            head_stride=head.stride * itemsize,
            split=split.extent,
            split_stride=split.stride * itemsize,
        )

    def error(self, what: str) -> LayoutError:
        """What is wrong with this string."""
        return LayoutError(f"axes {self.text!r}: {what}")

    def _where(self, shape: Sequence[int], strides: Sequence[int]) -> str:
        return f"({self.text!r}), got shape {tuple(shape)} stride {tuple(strides)}"

    def _check_words(self) -> None:
        known = (*PLANE_WORDS, *ROW_WORDS)
        rows = " ".join(ROW_WORDS)
        for word in self.levels or ():
            if word not in ROW_WORDS:
                raise self.error(f"{word!r} in front of the bar, where only {rows} can stand")
        for word in itertools.chain(*self.folds):
            if word not in (*known, "1"):
                raise self.error(f"unknown axis {word!r}, known are {' '.join(known)}")
        for word in ("plane", "kv"):
            if self.words.count(word) > 1:
                raise self.error(f"axis {word!r} named twice")
        if "block" not in self.words:
            raise self.error("axis 'block' is missing")


def row_offsets(axes: Sequence[Axis]) -> Iterator[tuple[tuple[tuple[str, int], ...], int]]:
    """For each row of a tensor, its place as (word, index) pairs and its offset in elements."""
    outer = [axis for axis in axes if axis.word in ROW_WORDS]
    for index in itertools.product(*(range(axis.extent) for axis in outer)):
        place = tuple((axis.word, i) for axis, i in zip(outer, index, strict=True))
        yield place, sum(i * axis.stride for axis, i in zip(outer, index, strict=True))


def _join(axes: Sequence[Axis]) -> list[Axis]:
    """The axes of one word, slowest first, with neighbours joined whose strides are those of one."""
    joined: list[Axis] = []
    for axis in axes:
        if joined and axis.extent == 1:
            continue
        if joined and joined[-1].extent == 1:
            joined.pop()
        if joined and joined[-1].stride == axis.extent * axis.stride:
            axis = axis._replace(extent=joined.pop().extent * axis.extent)
        joined.append(axis)
    return joined


def _only(axes: Sequence[Axis], *, stride: int) -> Axis:
    """The one axis there is, or an axis of extent 1 in its place."""
    return axes[0] if axes else Axis("1", 1, stride)
