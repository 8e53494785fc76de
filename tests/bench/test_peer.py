"""Which copies between two GPUs are measured; the measuring itself needs two."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench import peer
from bench.cases import Case
from lmcache_kernels.plane import coalesce
from lmcache_kernels.views import plane_of

RUN_BYTES = {
    "Llama-3-70B TP8 [2,B,N,H,D]": 4096,
    "Llama-3-8B [2,B,N,H,D]": 32768,
    "DeepSeek-V3 MLA 64 [B,N,D]": 73728,
    "gpt-oss-120b [2,B,H,N,D] heads 3-3": 2048,
    "Llama-3-8B [2,B,H,N,D] heads 2-2": 4096,
    "Llama-3-8B [B,H,N,2D] heads 4-5": 16384,
    "Llama-3-8B [2,B,N,H,D] heads 2-3": 512,
}
"""By hand: a block, or what of it a slice of heads keeps together."""


def test_every_copy_is_pushed_and_pulled_and_whole_blocks_also_with_few_programs():
    found = {(t.name, t.direction, t.max_programs) for t in peer.peer_trials()}
    whole = {name for name in RUN_BYTES if "heads" not in name}
    assert found == {
        *((name, direction, None) for name in RUN_BYTES for direction in ("push", "pull")),
        *((name, direction, 32) for name in whole for direction in ("push", "pull")),
    }


@pytest.mark.parametrize("trial", list(peer.peer_trials()), ids=lambda trial: trial.title)
def test_runs_are_as_long_as_the_slice_leaves_them(trial):
    first, count = trial.heads or (0, trial.case.model.heads)
    narrow = Case(replace(trial.case.model, heads=count), trial.case.layout)
    source, destination = trial.case.tensors(2, "cpu"), narrow.tensors(2, "cpu")
    src = plane_of(source, trial.case.axes).narrow_heads(first, count)
    dst = plane_of(destination, narrow.axes)
    assert coalesce(dst, src)[0].width == RUN_BYTES[trial.name]
