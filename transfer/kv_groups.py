"""A KV cache as its owner hands it over: tensors by group, and what their axes mean."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from .cache_forms import ArraysForm, AxesForm, PagesForm, SharedPiece, read_group

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from lmcache_kernels.plane import CacheGroup
    from lmcache_kernels.views import Nested

    from .cache_forms import Form
    from .sharing.descriptors import TensorDescriptor


@dataclass(frozen=True, slots=True)
class KVGroup:
    """One KV-cache group: tensors that share block ids.

    Most groups are one piece, made by :meth:`of`, :meth:`of_pages` or :meth:`of_arrays`, which take
    what the functions of :mod:`lmcache_kernels.views` of like names take. Where layers of a group
    are unlike, :meth:`joined` makes one of several; its planes are in order of the pieces.
    """

    pieces: tuple[tuple[Nested, Form], ...]

    @classmethod
    def of(cls, tensors: Nested, axes: str, *, tokens_per_state: int = 1, **sizes: int) -> KVGroup:
        """See :func:`lmcache_kernels.views.group_of`."""
        form = AxesForm(axes=axes, sizes=sizes, tokens_per_state=tokens_per_state)
        return cls(((tensors, form),))

    @classmethod
    def of_pages(cls, pages: Nested, block_tokens: int, tag: str) -> KVGroup:
        """See :func:`lmcache_kernels.views.opaque_group_of`."""
        return cls(((pages, PagesForm(block_tokens=block_tokens, format=tag)),))

    @classmethod
    def of_arrays(
        cls, pages: Nested, block_tokens: int, widths: Sequence[int], *, tokens_per_state: int = 1
    ) -> KVGroup:
        """See :func:`lmcache_kernels.views.blocked_group_of`."""
        form = ArraysForm(
            block_tokens=block_tokens, widths=tuple(widths), tokens_per_state=tokens_per_state
        )
        return cls(((pages, form),))

    @classmethod
    def joined(cls, groups: Sequence[KVGroup]) -> KVGroup:
        """The pieces of several, which share block ids, as one group."""
        return cls(tuple(chain(*(group.pieces for group in groups))))

    def read(self) -> CacheGroup:
        """Its planes, as the tensors lie now.

        Raises:
            LayoutError: tensors that are not what was said of them.
        """
        return read_group(self.pieces)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All of them, in order of the pieces."""
        return [tensor for tensors, _ in self.pieces for tensor in _flat(tensors)[0]]

    def share(self, descriptors: Iterator[TensorDescriptor]) -> tuple[SharedPiece, ...]:
        """The group as another process reads it; takes as many descriptors as it has tensors."""
        shared = []
        for tensors, form in self.pieces:
            flat, lists = _flat(tensors)
            if not isinstance(form, AxesForm):  # whose reading does not depend on lists
                lists = (len(flat),)
            some = tuple(next(descriptors) for _ in flat)
            shared.append(SharedPiece(tensors=some, lists=lists, form=form))
        return tuple(shared)


def nested(flat: Sequence[torch.Tensor], lists: Sequence[int]) -> Nested:
    """The tensors with lists around them, ``lists[0]`` of them in the outermost and so on."""
    found: Sequence[Nested] = flat
    for count in reversed(lists[1:]):
        found = [found[i : i + count] for i in range(0, len(found), count)]
    return found if lists else found[0]


def _flat(tensors: Nested) -> tuple[list[torch.Tensor], tuple[int, ...]]:
    """The tensors in order, and how many each level of lists around them holds."""
    import torch

    if isinstance(tensors, torch.Tensor):
        return [tensors], ()
    parts = [_flat(item) for item in tensors]
    inner = parts[0][1] if parts else ()
    return list(chain(*(part for part, _ in parts))), (len(parts), *inner)
