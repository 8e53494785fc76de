"""The picture of a directory, against a plain list."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from lmcache_kernels.adapters.tiers.file_index import BLOCK, FileIndex, folder_of, room_for


def key(number):
    return bytes([number % 2]) * 32, bytes([number // 2 % 3]) + bytes([number]) * 31


KEYS = [key(number) for number in range(12)]
SIZES = st.integers(1, 3 * BLOCK)


def test_room_is_counted_in_blocks():
    assert [room_for(n) for n in (1, BLOCK, BLOCK + 1)] == [BLOCK, BLOCK, 2 * BLOCK]


class Machine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.index = FileIndex()
        self.model = []  # (key, bytes), least lately used first

    def drop(self, gone):
        self.model = [(key, nbytes) for key, nbytes in self.model if key != gone]

    @rule(key=st.sampled_from(KEYS), nbytes=SIZES)
    def add(self, key, nbytes):
        self.index.add(key, nbytes)
        self.drop(key)
        self.model.append((key, nbytes))

    @rule(key=st.sampled_from(KEYS))
    def forget(self, key):
        self.index.forget(key)
        self.drop(key)

    @rule(key=st.sampled_from(KEYS), found=st.dictionaries(st.sampled_from(KEYS), SIZES))
    def correct(self, key, found):
        folder = folder_of(key)
        found = {key: nbytes for key, nbytes in found.items() if folder_of(key) == folder}
        known = {key for key, _ in self.model}
        self.index.correct(folder, found)
        self.model = [(k, n) for k, n in self.model if folder_of(k) != folder or k in found]
        new = [(key, found[key]) for key in found if key not in known]
        assert {key for key in found if key in self.index} == set(found)
        # Their order among themselves is any.
        self.model += sorted(new, key=lambda one: list(self.index._room).index(one[0]))

    @invariant()
    def agrees(self):
        assert len(self.index) == len(self.model)
        assert [key in self.index for key in KEYS] == [key in dict(self.model) for key in KEYS]
        assert self.index.used_bytes == sum(room_for(nbytes) for _, nbytes in self.model)
        assert self.index.oldest() == (self.model[0][0] if self.model else None)
        assert self.index.folders == len({folder_of(key) for key, _ in self.model})


def test_it_is_like_a_list_in_the_order_of_use(full):
    run_state_machine_as_test(
        Machine, settings=settings(max_examples=1000 if full else 60, stateful_step_count=30)
    )
