"""The slot allocator against a list of intervals."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lmcache_kernels.errors import ConfigError, LocalProtocolError
from lmcache_kernels.transfer.serving.slots import SlotAllocator

ALIGN = 8
CAPACITY = 40 * ALIGN


class SlotMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.slots = SlotAllocator(CAPACITY + ALIGN - 1, ALIGN)
        self.used: dict[int, int] = {}

    def gaps(self) -> list[tuple[int, int]]:
        edges = sorted(self.used.items())
        starts = [0, *(start + size for start, size in edges)]
        ends = [*(start for start, _ in edges), CAPACITY]
        return [(a, b) for a, b in zip(starts, ends, strict=True) if a < b]

    @rule(nbytes=st.one_of(st.integers(1, 12 * ALIGN), st.just(CAPACITY), st.just(CAPACITY + 1)))
    def allocate(self, nbytes: int) -> None:
        size = -(-nbytes // ALIGN) * ALIGN
        gaps = self.gaps()
        offset = self.slots.allocate(nbytes)
        fitting = [b - a for a, b in gaps if b - a >= size]
        if not fitting:
            assert offset is None
            return
        assert offset is not None
        assert offset % ALIGN == 0
        assert (min(fitting)) in {b - a for a, b in gaps if a <= offset and offset + size <= b}
        self.used[offset] = size

    @precondition(lambda self: self.used)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        offset = data.draw(st.sampled_from(sorted(self.used)))
        self.slots.free(offset)
        del self.used[offset]
        with pytest.raises(LocalProtocolError, match=f"got {offset}"):
            self.slots.free(offset)

    @rule(offset=st.integers(-ALIGN, 2 * CAPACITY))
    def free_unknown(self, offset: int) -> None:
        if offset not in self.used:
            with pytest.raises(LocalProtocolError):
                self.slots.free(offset)

    @invariant()
    def sizes_are_those_of_the_gaps(self) -> None:
        assert self.slots.used_bytes == sum(self.used.values())
        assert self.slots.free_bytes == CAPACITY - self.slots.used_bytes
        assert self.slots.largest_free == max((b - a for a, b in self.gaps()), default=0)

    def teardown(self) -> None:
        """The free units are exactly the unused ones, each once; and all merge again."""
        units = {u for a, b in self.gaps() for u in range(a, b, ALIGN)}
        drained = []
        while (offset := self.slots.allocate(1)) is not None:
            drained.append(offset)
        assert sorted(drained) == sorted(units)
        for offset in [*drained, *self.used]:
            self.slots.free(offset)
        assert self.slots.largest_free == CAPACITY
        assert self.slots.used_bytes == 0


TestSlotMachine = SlotMachine.TestCase
TestSlotMachine.settings = settings(stateful_step_count=40)


def test_sizes_are_rounded_to_the_alignment_only() -> None:
    slots = SlotAllocator(1 << 20)
    slots.allocate(5 * 512 + 1)
    assert slots.used_bytes == 6 * 512
    assert slots.round_up(512) == 512


def test_uniform_slots_survive_heavy_fragmentation() -> None:
    count, size = 100_000, 1024
    slots = SlotAllocator(count * size)
    offsets = [slots.allocate(size) for _ in range(count)]
    assert slots.allocate(1) is None
    order = list(range(0, count, 2))
    random.Random(1).shuffle(order)
    for index in order:
        offset = offsets[index]
        assert offset is not None
        slots.free(offset)
    assert slots.largest_free == size
    assert slots.allocate(size + 1) is None
    assert {slots.allocate(size) for _ in order} == {offsets[index] for index in order}
    assert slots.free_bytes == 0


def test_capacity_below_one_unit_has_no_room() -> None:
    slots = SlotAllocator(100, 512)
    assert slots.capacity_bytes == slots.largest_free == 0
    assert slots.allocate(1) is None


@pytest.mark.parametrize(("capacity", "align"), [(0, 512), (-1, 512), (10, 0)])
def test_impossible_settings_are_refused(capacity: int, align: int) -> None:
    with pytest.raises(ConfigError, match="capacity and align"):
        SlotAllocator(capacity, align)


@pytest.mark.parametrize("nbytes", [0, -1])
def test_empty_slots_are_refused(nbytes: int) -> None:
    with pytest.raises(LocalProtocolError, match=">= 1 byte"):
        SlotAllocator(1024).allocate(nbytes)
