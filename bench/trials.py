"""The registry of trials: which cases are measured, how large, which way, with which ids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from . import cases
from .cases import CASES, Case
from .results import title_of

if TYPE_CHECKING:
    from collections.abc import Iterator

DIRECTIONS = ("gather", "scatter")
CHUNK_TOKENS = 256


@dataclass(frozen=True)
class Trial:
    """One row of a result.

    Attributes:
        direction: "gather" (blocks to chunks) or "scatter" (chunks to blocks).
        nbytes: least payload.
        ids: "random" or "contiguous" block ids.
        max_programs: bound on the kernel's grid; None: none.
        variant: which of the library's copies is measured, a name in
            ``kernels.OURS_BY_VARIANT``.
        chunk_tokens: tokens of one chunk, whole blocks.
    """

    case: Case
    direction: str
    nbytes: int
    ids: str = "random"
    max_programs: int | None = None
    variant: str = "plain"
    chunk_tokens: int = CHUNK_TOKENS

    @property
    def title(self) -> str:
        return title_of(self.case.name, self.direction, self.variant, self.ids, self.max_programs)


def trials(size_mb: int) -> Iterator[Trial]:
    """Every layout both ways with random ids, then what a few of them do in other conditions."""
    large = size_mb << 20
    for direction in DIRECTIONS:
        for case in CASES:
            yield Trial(case, direction, large)
    few = [
        Case(cases.LLAMA_8B, cases.KV_FIRST),
        Case(cases.LLAMA_8B, cases.KV_FIRST_HND),
        Case(cases.MLA_64, cases.LATENT),
    ]
    for direction in DIRECTIONS:
        for case in CASES:
            yield Trial(case, direction, large, variant="checksum")
        for case in few:
            yield Trial(case, direction, large, ids="contiguous")
            yield Trial(case, direction, large // 4)
            yield Trial(case, direction, large, max_programs=16)
            yield Trial(case, direction, large, max_programs=32)
