"""The planner: pure, monotone where its measurements are, and honest about what it does not know."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_kernels.transfer.moving.planner import DISTURBING_SECONDS, Job, Planner, Sample

RUNS, COUNTS = (256, 4096, 1 << 20), (16, 512, 8192)


def machine(**seconds):
    """Samples of paths, each from a function of run bytes and count; both ways alike."""
    return [
        Sample(path, storing, run, count, cost(run, count))
        for path, cost in seconds.items()
        for storing in (True, False)
        for run in RUNS
        for count in COUNTS
    ]


USUAL = machine(
    staged=lambda run, count: 60e-6 + run * count / 54e9,
    direct=lambda run, count: 25e-6 + run * count / 50e9,
    batch=lambda run, count: 30e-6 + max(count * 1.3e-6, run * count / 55e9),
)
ALL = ["staged", "direct", "batch"]


@pytest.mark.parametrize(
    ("run", "count", "path"),
    [(256, 16, "direct"), (4096, 8192, "staged"), (1 << 20, 64, "batch"), (256, 8192, "direct")],
)
def test_each_path_has_its_place(run, count, path):
    choice = Planner(USUAL).choose(Job(True, run, count), ALL)
    assert choice.path == path
    assert choice.why.startswith(f"{path}: store of {count} x {run} B, expected ")
    assert "\n" not in choice.why


@given(
    run=st.integers(1, 1 << 24),
    count=st.integers(1, 1 << 20),
    storing=st.booleans(),
    possible=st.sets(st.sampled_from(ALL[1:])),
    decoding=st.booleans(),
)
def test_what_is_chosen_is_possible_and_none_is_expected_to_be_quicker(
    run, count, storing, possible, decoding
):
    planner, job = Planner(USUAL), Job(storing, run, count, decoding)
    choice = planner.choose(job, ["staged", *possible])
    assert choice.path in {"staged", *possible}
    chosen = planner.seconds(choice.path, job)
    for path in {"staged", *possible} - {"direct"}:
        assert chosen <= planner.seconds(path, job)
    if choice.path == "direct":
        assert chosen <= DISTURBING_SECONDS[decoding]


def test_kernels_hold_the_link_for_longer_if_nobody_decodes():
    job = Job(True, 4096, 1024)
    assert Planner(USUAL).choose(job, ALL[:2]).path == "direct"
    assert Planner(USUAL).choose(replace(job, decoding=True), ALL[:2]).path == "staged"


@pytest.mark.parametrize(("count", "path"), [(512, "direct"), (4096, "staged")])
def test_kernels_hold_the_link_only_where_that_is_a_tenth_quicker(count, path):
    """2 and 16 MiB: 99 and 371 us by slices, 67 and 361 us without."""
    assert Planner(USUAL).choose(Job(True, 4096, count), ALL[:2]).path == path


@given(run=st.sampled_from(RUNS), count=st.sampled_from(COUNTS), storing=st.booleans())
def test_what_was_measured_is_what_is_expected(run, count, storing):
    (seconds,) = [
        one.seconds
        for one in USUAL
        if (one.path, one.storing, one.run_bytes, one.runs) == ("batch", storing, run, count)
    ]
    assert Planner(USUAL).seconds("batch", Job(storing, run, count)) == pytest.approx(seconds)


@given(
    run=st.integers(256, 1 << 20),
    count=st.integers(16, 8192),
    more=st.floats(1, 4),
    path=st.sampled_from(ALL),
)
def test_more_is_never_expected_to_be_quicker(run, count, more, path):
    planner = Planner(USUAL)
    less = planner.seconds(path, Job(True, run, count))
    assert less <= planner.seconds(path, Job(True, int(run * more), count)) * (1 + 1e-9)
    assert less <= planner.seconds(path, Job(True, run, int(count * more))) * (1 + 1e-9)


@pytest.mark.parametrize("storing", [True, False])
def test_fault_j04_no_path_is_much_slower_than_another_that_may_be_taken(storing):
    """No size is a border by itself: what a machine was seen to do decides, and settings override."""
    planner = Planner(USUAL)
    for power in range(10, 21):
        for count in (1, 4, 16, 64, 256, 1024, 4096):
            job = Job(storing, 1 << power, count)
            chosen = planner.seconds(planner.choose(job, ALL).path, job)
            assert chosen <= 1.5 * min(planner.expected(job, ALL).values())
    other = machine(staged=lambda run, count: 1.0, batch=lambda run, count: 2.0 * run / 4096)
    assert Planner(other).choose(Job(storing, 1024, 64), ALL).path == "batch"
    assert Planner(other).choose(Job(storing, 1 << 14, 64), ALL).path == "staged"


def test_a_machine_that_was_not_measured_gets_the_staged_path():
    for samples in (None, [], machine(direct=lambda run, count: 1e-6)):
        choice = Planner(samples).choose(Job(False, 4096, 100), ALL)
        assert choice.path == "staged"
        assert "not calibrated" in choice.why


def test_holes_in_the_measurements_are_bridged():
    some = [one for one in USUAL if one.run_bytes * one.runs <= 1 << 24]
    assert Planner(some).seconds("staged", Job(True, 1 << 20, 8192)) > 8192 * (1 << 20) / 60e9
