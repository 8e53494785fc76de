"""Requests through a real server process, and stores handed over while others wait."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench import latency, round_trip, submit_cost
from bench.cases import KV_FIRST, LATENT, Case, Model
from bench.latency import Request
from bench.options import Options
from bench.results import problems
from bench.round_trip import comes_back, new_digests
from lmcache_kernels.adapters.server.spawn import spawn_server

SMALL = Case(Model("small", layers=2, heads=3, dim=8), KV_FIRST)


def names(rig, only=None):
    options = Options(only=only)
    return [r for some in latency.requests(replace(rig, options=options)).values() for r in some]


def test_few_chunks_up_to_many_are_loaded_and_other_layouts_go_both_ways(rig):
    found = names(rig)
    counts = [r.chunks for r in found if r.case is latency.COUNTED]
    assert counts == [1, 8, 64, 512]
    for case in latency.FEW:
        both = [r for r in found if r.case is case]
        assert [r.direction for r in both] == ["store", "load"]
        assert all(256 << 20 <= r.nbytes < 300 << 20 for r in both)


@pytest.mark.parametrize(
    ("only", "count"), [("latency", 10), ("64 chunks load", 1), ("latency MLA", 0), ("store", 3)]
)
def test_titles_choose(rig, only, count):
    assert len(names(rig, only)) == count


def test_requests_become_rows(rig, make_document):
    some = [Request(SMALL, "store", 3), Request(SMALL, "load", 1), Request(SMALL, "load", 3)]
    with spawn_server(size_gb=1 / 512, chunk_size=256) as server:
        rows = list(latency.measure_requests(SMALL, some, rig, server.url))
    assert [row.title for row in rows] == [
        f"latency {SMALL.name} {count} chunks {direction}, 0 MiB"
        for direction, count in (("store", 3), ("load", 1), ("load", 3))
    ]
    assert all(row.bit_exact for row in rows)
    assert all(set(row.seconds) == {"ours", "link"} for row in rows)
    assert all(set(row.absent) == {"lmcache_staged"} for row in rows)
    assert problems(make_document(*rows)) == []


class Forgetful:
    """A context that says it has done everything and has not."""

    def __init__(self, context):
        self._context = context
        self.submit_store = context.submit_store

    def submit_retrieve(self, digests, ids):
        from concurrent.futures import Future

        future = Future()
        future.set_result(len(digests))
        return future


@pytest.fixture
def embedded():
    """A context over a small cache with a cache in this process: (context, caches, ids)."""
    case = Case(Model("small", layers=1, heads=1, dim=8, block_tokens=64), LATENT)
    caches = case.tensors(16, "cpu")
    with submit_cost.open_context(case, caches, 1 << 20, None) as context:
        yield context, case, caches


def test_what_is_stored_comes_back(embedded):
    context, case, caches = embedded
    ids = [5, 0, 7, 2, 9, 11, 1, 3], [4, 6, 8, 10, 12, 13, 14, 15]
    assert comes_back(context, case, caches, new_digests(2), *ids)


def test_what_does_not_come_back_is_seen(embedded):
    context, case, caches = embedded
    assert not comes_back(
        Forgetful(context), case, caches, new_digests(1), [0, 1, 2, 3], [4, 5, 6, 7]
    )


def test_chunks_that_are_not_stored_or_not_there_are_errors(embedded):
    context, _, _ = embedded
    digests = new_digests(1)
    with pytest.raises(RuntimeError, match="loaded 0 of 1"):
        round_trip.load(context, digests, [0, 1, 2, 3])
    round_trip.store(context, digests, [0, 1, 2, 3])
    with pytest.raises(RuntimeError, match="stored 0 of 1"):
        round_trip.store(context, digests, [0, 1, 2, 3])


def test_only_submits_while_the_device_stands_are_timed(embedded):
    context, _, _ = embedded
    stands = iter([True, False, True])
    asked = []

    def stall():
        answer = next(stands)
        asked.append(answer)
        return lambda: answer

    times = submit_cost.submit_times(context, [0, 1, 2, 3], 2 * submit_cost.IN_FLIGHT, stall)
    assert len(times) == 2 * submit_cost.IN_FLIGHT
    assert asked == [True, False, True]
    assert all(seconds > 0 for seconds in times)


def test_a_device_that_never_stands_is_an_error(embedded):
    context, _, _ = embedded
    with pytest.raises(RuntimeError, match="went on before"):
        submit_cost.submit_times(context, [0, 1, 2, 3], 1, lambda: lambda: False)


def test_what_handing_over_costs_becomes_a_row(rig, monkeypatch, make_document):
    monkeypatch.setattr(submit_cost, "CHUNKS", 4)
    monkeypatch.setattr(submit_cost, "CALLS", 104)
    (row,) = submit_cost.run(rig)
    assert row.bit_exact
    assert row.title == "submit 64 KiB chunks [2,B,N,H,D] 4 chunks"
    assert row.seconds["ours"].p99 >= row.seconds["ours"].p50
    assert problems(make_document(row)) == []
    assert "p99" in submit_cost.line(row)
    assert submit_cost.run(replace(rig, options=Options(only="link"))) == []
