"""Blocks of a scheduler that its attention kernel cuts into smaller pages.

A plane always describes the smallest page, the one that the tensors have. Ids that count larger
blocks are spelled out in pages before they meet it. Pure.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

from .errors import LayoutError
from .ids import ABSENT

if TYPE_CHECKING:
    from collections.abc import Iterable


def pages_per_block(block_tokens: int, page_tokens: int) -> int:
    """How many pages of ``page_tokens`` make one block of ``block_tokens``.

    Raises:
        LayoutError: pages that do not make whole blocks.
    """
    if page_tokens < 1 or block_tokens < 1 or block_tokens % page_tokens:
        raise LayoutError(
            f"block of {block_tokens} tokens: expected a whole number of pages, "
            f"got pages of {page_tokens} tokens"
        )
    return block_tokens // page_tokens


def split_ids(ids: Iterable[int], ratio: int) -> list[int]:
    """The ids of the ``ratio`` pages of each block, in order of their tokens; an absent block has absent pages.

    Raises:
        LayoutError: a ratio below 1.
    """
    if ratio < 1:
        raise LayoutError(f"pages in a block: expected >= 1, got {ratio}")
    return [
        ABSENT if block == ABSENT else operator.index(block) * ratio + page
        for block in ids
        for page in range(ratio)
    ]
