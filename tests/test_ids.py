"""Block ids in every form callers hold them, checked alike."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lmcache_kernels import LayoutError
from lmcache_kernels.ids import ABSENT, MANY, pack_ids

FORMS = {
    "list": list,
    "tuple": tuple,
    "generator": iter,
    "int64": lambda ids: np.array(ids, dtype=np.int64),
    "int32": lambda ids: np.array(ids, dtype=np.int32),
    "reversed view": lambda ids: np.array(ids[::-1], dtype=np.int64)[::-1],
    "tensor": torch.tensor,
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("count", [1, 5, MANY - 1, MANY, 3 * MANY])
@pytest.mark.parametrize("destination", [False, True])
def test_every_form_packs_to_the_same_words(form, count, destination):
    ids = np.random.default_rng(count).permutation(1000)[:count].tolist()
    packed = pack_ids(FORMS[form](ids), 1000, "ids", destination)
    assert (packed.format, packed.tolist()) == ("i", ids)


@pytest.mark.parametrize(
    "ids", [range(0), range(7), range(3, 9), range(8, 0, -2), range(0, 999, 7)]
)
def test_ranges(ids):
    assert pack_ids(ids, 1000, "ids", True).tolist() == list(ids)


def test_a_range_longer_than_those_at_hand():
    assert pack_ids(range(20_000), 20_000, "ids", True).tolist() == list(range(20_000))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("count", [2, MANY, 2 * MANY])
def test_repeats_are_for_sources_only(form, count):
    ids = [*range(1, count), 1]
    assert pack_ids(FORMS[form](ids), 1000, "ids", False).tolist() == ids
    with pytest.raises(LayoutError, match=rf"ids\[{count - 1}\]: block 1 named twice"):
        pack_ids(FORMS[form](ids), 1000, "ids", True)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("count", [3, MANY])
def test_absent_is_for_destinations_only(form, count):
    ids = [ABSENT, *range(count), ABSENT]
    assert pack_ids(FORMS[form](ids), 1000, "ids", True).tolist() == ids
    with pytest.raises(LayoutError, match=r"ids\[0\]: expected 0 <= id < 1000, got -1"):
        pack_ids(FORMS[form](ids), 1000, "ids", False)


@pytest.mark.parametrize("bad", [1000, -2, 2**31, -(2**31) - 1, 2**63 - 1])
@pytest.mark.parametrize("before", [0, MANY])
@pytest.mark.parametrize("form", ["list", "tuple", "generator", "int64", "tensor"])
@pytest.mark.parametrize("destination", [False, True])
def test_ids_out_of_range_are_refused(bad, before, form, destination):
    with pytest.raises(LayoutError, match="ids"):
        pack_ids(FORMS[form]([*range(before), bad]), 1000, "ids", destination)


@pytest.mark.parametrize("count", [1, MANY])
def test_unsigned_ids_do_not_wrap(count):
    with pytest.raises(LayoutError, match="ids"):
        pack_ids(np.array([2**64 - 1] * count, dtype=np.uint64), 1000, "ids", True)
    assert pack_ids(np.arange(70, dtype=np.uint8), 1000, "ids", True).tolist() == list(range(70))


@pytest.mark.parametrize(
    "ids",
    [
        None,
        3,
        "01",
        [1.0],
        ["1"],
        [None],
        np.array(1),
        np.array([[1], [2]]),
        np.array([True, False]),
        np.array([1.5]),
        torch.tensor([[1], [2]]),
        torch.tensor([True]),
        torch.tensor(1),
        torch.empty(2, dtype=torch.int64, device="meta"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("destination", [False, True])
def test_what_is_no_list_of_integers_is_refused(ids, destination):
    with pytest.raises(LayoutError, match="ids: expected"):
        pack_ids(ids, 1000, "ids", destination)


@given(st.lists(st.integers(-3, 12), max_size=2 * MANY), st.booleans())
def test_lists_and_arrays_agree_on_what_is_right(ids, destination):
    def accepted(form):
        try:
            return pack_ids(form(ids), 10, "ids", destination).tolist() == ids
        except LayoutError:
            return False

    good = all((ABSENT if destination else 0) <= block < 10 for block in ids)
    named = [block for block in ids if block != ABSENT]
    if destination:
        good = good and len(set(named)) == len(named)
    assert accepted(list) is good
    assert accepted(lambda ids: np.array(ids, dtype=np.int64)) is good
