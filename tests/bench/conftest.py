"""Small work and made-up results."""

from __future__ import annotations

import pytest

from bench.cases import CROSS_LAYER, FUSED_VIEW, KV_FIRST, KV_FIRST_HND, LATENT, Case, Model
from bench.options import Options
from bench.plain_link import PlainLink
from bench.results import SCHEMA, Document, Row, with_ratios
from bench.rig import Rig
from bench.timing import HostClock, Spread
from bench.trials import Trial

TINY = Model("tiny", layers=2, heads=3, dim=8)
LATENT_TINY = Model("tiny latent", layers=3, heads=1, dim=20, block_tokens=64, element_bytes=1)


@pytest.fixture(
    params=[KV_FIRST, KV_FIRST_HND, FUSED_VIEW, CROSS_LAYER, LATENT], ids=lambda layout: layout.name
)
def tiny_case(request):
    return Case(LATENT_TINY if request.param is LATENT else TINY, request.param)


@pytest.fixture(params=["gather", "scatter"])
def tiny_trial(request, tiny_case):
    return Trial(
        tiny_case, request.param, 3 * 256 // tiny_case.block_tokens * tiny_case.block_bytes
    )


@pytest.fixture
def rig():
    """Parts of the engine's benchmark in host memory, small."""
    found = Rig(Options(size_mb=1, rounds=2), "cpu", HostClock())
    vars(found)["link"] = PlainLink("cpu", 1 << 20)  # in place of a gigabyte
    return found


@pytest.fixture
def make_row():
    def make(case="Llama [2,B,N,H,D]", milliseconds=2.0, ceiling_milliseconds=1.9, **changed):
        fields = {
            "case": case,
            "variant": "plain",
            "direction": "gather",
            "ids": "random",
            "bytes": 1 << 28,
            "run_bytes": 32768,
            "max_programs": None,
            "bit_exact": True,
            "traffic": 2,
            "ceiling": "plain",
            "seconds": {"ours": spread(milliseconds), "plain": spread(ceiling_milliseconds)},
            **changed,
        }
        return with_ratios(Row(**fields))

    return make


@pytest.fixture
def make_document():
    def make(*rows, **machine):
        described = {"gpu": "NVIDIA <H200>", "commit": "abc", "date": "2026-12-01", **machine}
        return Document(SCHEMA, "kernels", described, list(rows))

    return make


def spread(milliseconds):
    return Spread(*(part * milliseconds / 1e3 for part in (0.99, 1.0, 1.01)))
