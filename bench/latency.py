"""Storing and loading through a real server process, from the call until the result is there.

By the host's clock, against plain copies of as many bytes and against LMCache's staged path, which
here has no server to ask. Both of these use their host memory again and again where the load is
larger.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from lmcache_kernels.adapters.messaging.connect import connect
from lmcache_kernels.adapters.server.spawn import spawn_server
from lmcache_kernels.transfer.memory.slot_header import HEADER_BYTES
from lmcache_kernels.views import group_of

from . import cases
from .baselines import NotApplicable, lmcache_staged, ready
from .baselines.lmcache_ops import layer_of
from .cases import Case
from .link import line
from .moving import TIMEOUT
from .plain_link import CEILING
from .results import OURS, Row, with_ratios
from .round_trip import comes_back, load, new_digests, store
from .timing import Contender, HostClock, measure
from .trials import CHUNK_TOKENS, Trial
from .workload import over

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from lmcache_kernels.transfer.engine_driven.context import EngineDrivenContext

    from .rig import Rig

PART = "latency"
COUNTED = Case(cases.LLAMA_70B_TP8, cases.KV_FIRST)
COUNTS = (1, 8, 64, 512)
FEW = (
    Case(cases.LLAMA_8B, cases.KV_FIRST),
    Case(cases.LLAMA_8B, cases.KV_FIRST_HND),
    Case(cases.MLA_64, cases.LATENT),
)
STAGED = "lmcache_staged"
STAGED_CHUNKS = 32
"""For which LMCache's path has host memory."""


@dataclass(frozen=True)
class Request:
    """``direction``: "store" or "load"."""

    case: Case
    direction: str
    chunks: int

    @property
    def name(self) -> str:
        return f"{self.case.name} {self.chunks} chunks"

    @property
    def blocks(self) -> int:
        return self.chunks * CHUNK_TOKENS // self.case.block_tokens

    @property
    def nbytes(self) -> int:
        return self.blocks * self.case.block_bytes


def requests(rig: Rig) -> dict[Case, list[Request]]:
    """Loads of few chunks up to many, and stores and loads of the size a person chooses."""
    found = {COUNTED: [Request(COUNTED, "load", count) for count in COUNTS]}
    for case in FEW:
        blocks = case.blocks_for(rig.options.size_mb << 20, CHUNK_TOKENS // case.block_tokens)
        chunks = blocks * case.block_tokens // CHUNK_TOKENS
        found[case] = [Request(case, direction, chunks) for direction in ("store", "load")]
    wanted = {
        case: [r for r in some if rig.wants(PART, r.name, r.direction, r.nbytes >> 20)]
        for case, some in found.items()
    }
    return {case: some for case, some in wanted.items() if some}


def run(rig: Rig) -> list[Row]:
    """Measure every request, printing each as it is done."""
    rows = []
    for case, some in requests(rig).items():
        # A store needs room beside the chunks of the one before.
        chunks = max(r.chunks if r.direction == "load" else 2 * r.chunks for r in some)
        slot = HEADER_BYTES + CHUNK_TOKENS // case.block_tokens * case.block_bytes
        with spawn_server(size_gb=(chunks + 2) * slot / 2**30, chunk_size=CHUNK_TOKENS) as server:
            for row in measure_requests(case, some, rig, server.url):
                print(line(row), flush=True)
                rows.append(row)
    return rows


def measure_requests(case: Case, some: Sequence[Request], rig: Rig, url: str) -> Iterator[Row]:
    """The rows of requests for one cache, at the server at ``url``."""
    blocks = max(request.blocks for request in some)
    caches = case.tensors(2 * blocks, rig.device)
    order = torch.randperm(2 * blocks, generator=torch.Generator().manual_seed(7)).tolist()
    with connect(
        url,
        [group_of(caches, case.axes)],
        chunk_tokens=CHUNK_TOKENS,
        timeout=TIMEOUT,
        max_programs=rig.max_programs,
    ) as context:
        for request in some:
            source, target = order[: request.blocks], order[blocks : blocks + request.blocks]
            yield _measure(request, context, caches, source, target, rig)


def _measure(
    request: Request,
    context: EngineDrivenContext,
    caches: list[torch.Tensor],
    source: list[int],
    target: list[int],
    rig: Rig,
) -> Row:
    storing = request.direction == "store"
    digests = new_digests(request.chunks)
    exact = comes_back(context, request.case, caches, digests, source, target)

    def ours() -> None:
        if storing:
            store(context, new_digests(request.chunks), source)
        else:
            load(context, digests, target)

    actions = {OURS: ours, CEILING: lambda: rig.link.copy(storing, request.nbytes)}
    trial = Trial(request.case, "gather" if storing else "scatter", request.nbytes)
    ids = source if storing else target
    theirs, absent = ready({STAGED: lambda: _staged(trial, caches, ids, rig)})
    contenders = [
        Contender(name, partial(_drained, action, rig), request.nbytes)
        for name, action in {**actions, **theirs}.items()
    ]
    return with_ratios(
        Row(
            part=PART,
            case=request.name,
            variant="plain",
            direction=request.direction,
            ids="random",
            bytes=request.nbytes,
            run_bytes=0,
            max_programs=rig.max_programs,
            bit_exact=exact,
            traffic=1,
            ceiling=CEILING,
            seconds=measure(contenders, rig.options.rounds, HostClock()),
            absent=absent,
        )
    )


def _staged(
    trial: Trial, caches: list[torch.Tensor], ids: list[int], rig: Rig
) -> Callable[[], None]:
    def memory(chunks: int, nbytes: int) -> torch.Tensor:
        return rig.memory(min(chunks, STAGED_CHUNKS), nbytes)

    work = over(trial, rig.device, caches, ids, memory)
    staged = lmcache_staged.Staged(work)
    some = replace(work, ids=ids[: len(work.chunk) * work.blocks_per_chunk])
    staged(some.ids)
    if not some.is_exact(layer_of=partial(layer_of, some)):
        raise NotApplicable("its copy differs from what torch's indexing finds")
    return partial(staged, ids)


def _drained(action: Callable[[], object], rig: Rig) -> None:
    action()
    rig.drain()
