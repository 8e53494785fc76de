"""The loop that times calls, with the host's own copy in place of a launch."""

from __future__ import annotations

import functools

import pytest

from bench import host_cost
from bench.trials import Trial
from bench.workload import set_up


@pytest.fixture(scope="module")
def work():
    return set_up(Trial(host_cost.CASE, "gather", host_cost.CASE.block_bytes), "cpu")


@pytest.mark.parametrize("kind", list(host_cost.KINDS))
def test_a_call_is_timed_and_checked(work, kind):
    drained = []
    row = host_cost.measure_call(work, 2, kind, 20, lambda: drained.append(1))
    assert row.bit_exact
    assert row.seconds["ours"].p50 > 0
    assert set(row.absent) == {"triton_launch", "lmcache"}
    assert set(row.parts) == {"ids"}
    assert 0 < row.parts["ids"] < row.seconds["ours"].p80
    assert len(drained) >= 20 // host_cost.CALLS_IN_FLIGHT
    assert f"2 ids    as {kind}" in host_cost.line(row)


def test_parts_of_a_call_are_timed_and_then_left_alone(work, monkeypatch):
    from lmcache_kernels import plane

    real = plane.Plane.block_offset
    monkeypatch.setattr(
        host_cost,
        "PARTS",
        {
            "offset": host_cost.Part("lmcache_kernels.plane", "Plane.block_offset"),
            "made": host_cost.Part("functools", "partial", made=True),
        },
    )
    with host_cost._parts_timed() as parts:
        work.pool.block_offset(1)
        work.pool.block_offset(2)
        made = functools.partial(int, "7")
        assert parts["made"] == []
        assert made() == 7
    assert len(parts["offset"]) == 2
    assert len(parts["made"]) == 1
    assert plane.Plane.block_offset is real


def test_a_part_that_is_called_twice_a_call_counts_twice():
    warm = [9.0] * 2 * host_cost.WARM_UPS
    assert host_cost._per_call([*warm, 1.0, 2.0, 1.0, 4.0, 1.0, 3.0], 3) == 4.0


def test_every_part_that_is_named_exists():
    with host_cost._parts_timed() as parts:
        assert set(parts) == set(host_cost.PARTS)
