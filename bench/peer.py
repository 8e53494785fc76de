"""Blocks to blocks of another GPU over NVLink, against one peer copy of the same bytes.

Pushed: the GPU that holds the source runs the kernel and writes over the link. Pulled: the other
one does and reads. A slice of heads is what a rank with more heads hands to one with fewer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from lmcache_kernels.copying import prepare_copy
from lmcache_kernels.plane import coalesce
from lmcache_kernels.views import plane_of

from . import cases
from .cases import Case
from .kernels import line
from .results import OURS, Row, title_of, with_ratios
from .timing import Contender, DeviceClock, measure

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .options import Options

SOURCE, DESTINATION = "cuda:0", "cuda:1"
RUNS_ON = {"push": SOURCE, "pull": DESTINATION}
CEILING = "peer_copy"


@dataclass(frozen=True)
class PeerTrial:
    """``heads``: (first, count) of the source's heads, all that the destination has; None: all."""

    case: Case
    direction: str
    heads: tuple[int, int] | None = None
    max_programs: int | None = None

    @property
    def name(self) -> str:
        if self.heads is None:
            return self.case.name
        first, count = self.heads
        return f"{self.case.name} heads {first}-{first + count - 1}"

    @property
    def title(self) -> str:
        return title_of(self.name, self.direction, "plain", "random", self.max_programs)


def peer_trials() -> Iterator[PeerTrial]:
    whole = [
        Case(cases.LLAMA_70B_TP8, cases.KV_FIRST),  # 4 KB
        Case(cases.LLAMA_8B, cases.KV_FIRST),  # 32 KB
        Case(cases.MLA_64, cases.LATENT),  # 73 KB
    ]
    sliced = [
        (Case(cases.GPT_OSS, cases.KV_FIRST_HND), (3, 1)),  # 2 KB
        (Case(cases.LLAMA_8B, cases.KV_FIRST_HND), (2, 1)),  # 4 KB
        (Case(cases.LLAMA_8B, cases.FUSED_HND), (4, 2)),  # 16 KB
        (Case(cases.LLAMA_8B, cases.KV_FIRST), (2, 2)),  # 512 B, token-major
    ]
    for direction in RUNS_ON:
        for case in whole:
            for max_programs in (None, 32):
                yield PeerTrial(case, direction, max_programs=max_programs)
        for case, heads in sliced:
            yield PeerTrial(case, direction, heads)


def run(options: Options) -> list[Row]:
    """Measure every trial on two GPUs, printing each as it is done."""
    rows = []
    with (
        torch.cuda.stream(torch.cuda.Stream(DESTINATION)),
        torch.cuda.stream(torch.cuda.Stream(SOURCE)),
    ):
        clock = DeviceClock([SOURCE, DESTINATION])
        for trial in peer_trials():
            if options.wants(trial.title):
                rows.append(_measure(trial, options, clock))
                print(line(rows[-1]), flush=True)
    return rows


def _measure(trial: PeerTrial, options: Options, clock: DeviceClock) -> Row:
    torch.manual_seed(7)
    first, count = trial.heads or (0, trial.case.model.heads)
    narrow = Case(replace(trial.case.model, heads=count), trial.case.layout)
    blocks = narrow.blocks_for(options.size_mb << 20)
    moved = blocks * narrow.block_bytes
    src_caches = trial.case.tensors(blocks, SOURCE)
    dst_caches = narrow.tensors(blocks, DESTINATION)
    src = plane_of(src_caches, trial.case.axes)
    if trial.heads is not None:
        src = src.narrow_heads(first, count)
    dst = plane_of(dst_caches, narrow.axes)
    generator = torch.Generator().manual_seed(7)
    src_ids = torch.randperm(blocks, generator=generator).tolist()
    dst_ids = torch.randperm(blocks, generator=generator).tolist()
    runs_on = RUNS_ON[trial.direction]
    prepared = prepare_copy(dst, src, max_programs=trial.max_programs, run_on=runs_on)

    def copy() -> None:
        prepared.copy(dst_ids, src_ids)

    _settle()
    copy()
    _settle()
    exact = all(
        torch.equal(
            into[:, dst_ids].to(SOURCE), out[:, src_ids, :, first : first + count].contiguous()
        )
        for into, out in zip(
            narrow.layer_views(dst_caches), trial.case.layer_views(src_caches), strict=True
        )
    )
    here = torch.randint(0, 256, (moved,), dtype=torch.uint8, device=SOURCE)
    there = torch.empty_like(here, device=DESTINATION)
    contenders = [
        Contender(OURS, copy, moved, runs_on),
        Contender(CEILING, lambda: there.copy_(here, non_blocking=True), moved, SOURCE),
    ]
    return with_ratios(
        Row(
            case=trial.name,
            variant="plain",
            direction=trial.direction,
            ids="random",
            bytes=moved,
            run_bytes=coalesce(dst, src)[0].width,
            max_programs=trial.max_programs,
            bit_exact=exact,
            traffic=1,
            ceiling=CEILING,
            seconds=measure(contenders, options.rounds, clock),
        )
    )


def _settle() -> None:
    for device in (SOURCE, DESTINATION):
        torch.cuda.current_stream(device).synchronize()
