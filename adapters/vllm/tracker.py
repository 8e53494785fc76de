"""What the scheduler's half remembers of one request. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Future

    from lmcache_kernels.transfer.keys import ChunkChain
    from lmcache_kernels.transfer.messages import Reply


@dataclass(frozen=True, slots=True)
class GroupShape:
    """How one KV-cache group of the engine pages its tokens.

    ``window``: tokens its layers look back, None for all. The engine frees blocks that left the
    window while the request runs, without saying so, and lists them as block 0 from then on.
    """

    block_tokens: int
    window: int | None = None


@dataclass(slots=True)
class RequestTracker:
    """One request from its first lookup to its end.

    Attributes:
        session: its name at the server, unique among all engines there.
        chain: digests of its chunks.
        tokens: all its tokens; a live view that grows.
        prompt_chunks: whole chunks of the prompt; later ones are not stored.
        tenant: for whom they are stored.
        lookup: the answer on its way, or here.
        leased: a lookup was sent, so the server may hold chunks for us.
        hit_chunks: chunks the server has; None until the lookup was answered.
        local_tokens: tokens the engine found in its own prefix cache when it last asked.
        block_ids: per group, the request's whole block table.
        stored_chunks: chunks that were offered to the server or came from it.
        stores: ids of its store jobs that are not over.
        load: id of the load job whose outcome is not known, if there is one.
        load_failed: a load failed, so nothing is promised any more; the engine recomputes.
        admitted: blocks were allocated since the last lookup.
    """

    session: str
    chain: ChunkChain
    tokens: Sequence[int]
    prompt_chunks: int
    tenant: str = ""
    lookup: Future[Reply] | None = None
    leased: bool = False
    hit_chunks: int | None = None
    local_tokens: int = 0
    block_ids: list[list[int]] = field(default_factory=list)
    stored_chunks: int = 0
    stores: set[int] = field(default_factory=set)
    load: int | None = None
    load_failed: bool = False
    admitted: bool = False

    def take_blocks(self, block_ids: Sequence[Sequence[int]] | None, whole_table: bool) -> None:
        """The engine gave the request blocks: more of them, or its whole table anew."""
        if whole_table:
            self.block_ids = [list(ids) for ids in block_ids or ()]
        elif block_ids is not None:
            for known, added in zip(self.block_ids, block_ids, strict=True):
                known.extend(added)

    def restart(self) -> None:
        """The engine preempted the request: its blocks are gone, it will ask again."""
        self.lookup = None
        self.hit_chunks = None
        self.block_ids = []
        self.stored_chunks = 0
        self.load = None
        self.admitted = False


def fails_whole(groups: Sequence[GroupShape]) -> bool:
    """Must a failed load fail its whole request, rather than the blocks from there on?

    With several groups a block id does not say whose it is. With a window, the engine has left out
    the blocks before the window of the *promised* end, so it cannot go on from an earlier one.
    """
    return len(groups) > 1 or any(group.window is not None for group in groups)


def matched_tokens(hit_chunks: int, chunk_tokens: int, num_tokens: int, alignment: int) -> int:
    """Tokens the engine may take as computed when ``hit_chunks`` chunks are stored.

    At least one token stays for the model to compute, or there would be nothing to sample from;
    what remains of a full hit is rounded down to ``alignment``.
    """
    hit = hit_chunks * chunk_tokens
    if hit < num_tokens:
        return hit
    return (num_tokens - 1) // alignment * alignment


def slice_blocks(
    block_ids: Sequence[Sequence[int]],
    groups: Sequence[GroupShape],
    chunk_tokens: int,
    first: int,
    last: int,
) -> list[list[int]]:
    """Per group, the block ids of chunks [first, last)."""
    return [
        list(ids[first * chunk_tokens // g.block_tokens : last * chunk_tokens // g.block_tokens])
        for ids, g in zip(block_ids, groups, strict=True)
    ]


def chunks_allocated(
    block_ids: Sequence[Sequence[int]], groups: Sequence[GroupShape], chunk_tokens: int
) -> int:
    """Whole chunks for which every group has blocks."""
    return min(
        len(ids) * g.block_tokens // chunk_tokens for ids, g in zip(block_ids, groups, strict=True)
    )


def storable_chunks(
    block_ids: Sequence[Sequence[int]],
    groups: Sequence[GroupShape],
    chunk_tokens: int,
    chunks: range,
    computed_tokens: int,
) -> list[int]:
    """Those of ``chunks`` that can be stored whole in a step that starts at ``computed_tokens``.

    A chunk any of whose blocks has left a window cannot: its block may be someone else's by now.
    """
    return [
        chunk
        for chunk in chunks
        if not any(
            group.window is not None
            and (chunk * chunk_tokens < computed_tokens - group.window + 1 or 0 in ids)
            for group, ids in zip(
                groups,
                slice_blocks(block_ids, groups, chunk_tokens, chunk, chunk + 1),
                strict=True,
            )
        )
    ]
