"""The arena's benchmark: turns, figures, sizes; a real arena on a CUDA that is made up."""

from __future__ import annotations

import pytest
import torch

from bench import arena
from bench.arena import HOST_ALLOC, Ready
from bench.options import Options
from bench.results import OURS
from lmcache_kernels.transfer.memory.arena import SHM_DIRECTORY, Arena
from lmcache_kernels.transfer.memory.memory_room import Room

MIB = 1 << 20


class Registry:
    """``code``: what every registration ends with."""

    def __init__(self, code=0):
        self.code = code

    def register(self, address, nbytes):
        return self.code

    def unregister(self, address):
        return 0

    def forget_error(self):
        pass

    def same_addresses(self):
        return True


def test_everyone_warms_up_and_then_they_take_turns_in_being_first():
    called = []

    def contender(name, usable, registered):
        def once(nbytes):
            called.append(name)
            late = 10.0 if len(called) <= 2 else 0.0
            return Ready(usable + late, registered + late, True, {"create": usable / 2})

        return once

    rows = arena.measure(4 * MIB, 3, contender("ours", 1.0, 2.0), contender("theirs", 4.0, 3.0))
    assert called == ["theirs", "ours", "ours", "theirs", "theirs", "ours", "ours", "theirs"]
    usable, registered = rows
    assert usable.title == "arena usable, 4 MiB"
    assert usable.seconds[OURS].p50 == 1.0, "the warm-up does not count"
    assert usable.ratios == {HOST_ALLOC: 4.0}
    assert registered.ratios == {HOST_ALLOC: 1.5}
    assert usable.parts == {"create": 0.5}
    assert "4.00 times as fast" in arena.line(usable)


@pytest.mark.parametrize("wrong", [OURS, HOST_ALLOC])
def test_wrong_bytes_show(wrong):
    def of(name):
        return lambda nbytes: Ready(1.0, 1.0, name != wrong, {})

    rows = arena.measure(MIB, 2, of(OURS), of(HOST_ALLOC))
    assert not any(row.bit_exact for row in rows)


def test_a_real_arena_is_made_used_and_removed(monkeypatch):
    made, create = [], Arena.create
    monkeypatch.setattr(
        Arena, "create", lambda *size, **place: made.append(create(*size, **place)) or made[-1]
    )
    sample = torch.arange(MIB, dtype=torch.int64).to(torch.uint8)
    ready = arena.arena_ready(4 * MIB, sample, registry=Registry())
    assert ready.exact
    assert 0 < ready.parts["create"] < ready.usable <= ready.registered
    assert not (SHM_DIRECTORY / made[0].name).exists()


def test_an_arena_that_cannot_be_registered_has_no_figure():
    with pytest.raises(MemoryError, match="could not be registered"):
        arena.arena_ready(MIB, torch.zeros(4096, dtype=torch.uint8), registry=Registry(2))


@pytest.mark.parametrize(
    ("size_mb", "free", "expected"),
    [
        (256, 200 << 30, 32 << 30),
        (256, (10 << 30) + 12345, 5 << 30),
        (64, 200 << 30, 64 << 20),
        (512, 1 << 20, 512 << 20),
    ],
)
def test_the_size_is_what_was_asked_for_or_what_there_is_room_for(
    monkeypatch, size_mb, free, expected
):
    monkeypatch.setattr(arena, "tightest_room", lambda _: Room(free, "memory", ""))
    assert arena.size_of(Options(size_mb=size_mb)) == expected
