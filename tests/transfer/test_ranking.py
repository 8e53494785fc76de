"""The lowest of ranks that change, against looking at all of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lmcache_kernels.transfer.serving import ranking
from lmcache_kernels.transfer.serving.ranking import Ranking

KEYS = st.integers(0, 5)


@given(st.lists(st.tuples(KEYS, st.none() | st.integers(-3, 3)), max_size=80))
def test_the_lowest_is_found_whatever_came_before(changes) -> None:
    ranks: dict[int, int] = {}
    made: Ranking[int, float] = Ranking()
    for key, rank in changes:
        ranks.pop(key, None)
        if rank is None:
            made.discard(key)
        else:
            made.put(key, rank)
            ranks[key] = rank
        # Of equals the one that was put first, as in the order of the dict.
        expected = min(ranks.items(), key=lambda item: item[1], default=None)
        assert made.lowest() == expected
        assert len(made) == len(ranks)


def test_changes_without_end_leave_nothing_behind() -> None:
    made: Ranking[int, float] = Ranking()
    for turn in range(10_000):
        made.put(turn % 10, turn)
        made.put(turn, turn)
        made.discard(turn)
    assert len(made._heap) <= 2 * len(made) + ranking.FEW + 1
