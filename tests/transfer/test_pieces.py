"""Which copies bring the contents of a slice where they belong."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lmcache_kernels.transfer.moving.pieces import MAX_APART, Rows, in_rows


@st.composite
def stretches(draw):
    """Some behind each other in a slice, mostly even, anywhere in host memory."""
    here, there, found = 0, draw(st.integers(0, 100)) * 512, []
    nbytes, region = 512, 0
    for _ in range(draw(st.integers(0, 12))):
        what = draw(st.sampled_from(["even"] * 6 + ["size", "region", "far", "back", "close"]))
        if what == "size":
            nbytes = draw(st.integers(1, 2000))
        elif what == "region":
            region += 1
        elif what == "far":
            there += draw(st.sampled_from((512, 4096, MAX_APART - 1024, MAX_APART + 1)))
        elif what == "back":
            there -= draw(st.integers(1, 9000))
        elif what == "close":
            here += draw(st.integers(0, 3))
        found.append(Rows(here, there, nbytes, region))
        here += -(-nbytes // 512) * 512
        there += 1024
    return found


@given(stretches())
def test_rows_are_the_stretches_in_order(some):
    calls = in_rows(some)
    assert [
        Rows(
            call.here + row * call.here_apart,
            call.there + row * call.there_apart,
            call.nbytes,
            call.region,
        )
        for call in calls
        for row in range(call.times)
    ] == some
    for call in calls:
        if call.times > 1:
            assert call.nbytes <= call.here_apart <= MAX_APART
            assert call.nbytes <= call.there_apart <= MAX_APART
        else:
            assert (call.here_apart, call.there_apart) == (0, 0)


def test_even_stretches_are_one_call_and_an_odd_one_is_another():
    even = [Rows(n * 512, 7 + n * 4096, 500, 3) for n in range(9)]
    assert in_rows(even) == [Rows(0, 7, 500, 3, 9, 512, 4096)]
    odd = [*even[:4], *even[5:]]
    assert [call.times for call in in_rows(odd)] == [4, 4]
    assert in_rows([]) == []
