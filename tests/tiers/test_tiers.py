"""What every tier promises, for every tier there is."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from servicekit import wait_until
from tier_rig import content, new_keys
from tier_stores import BOUND, STORES, opened

from lmcache_kernels.adapters.tiers import mooncake, valkey
from lmcache_kernels.errors import LocalProtocolError, TierUnavailable

SIZES = [512, 1024, 65_536 + 512, 1 << 20, 4 << 20]


def chunks(keys, nbytes=4096):
    return {key: content(key, nbytes) for key in keys}


def lengths(keys, nbytes=4096):
    return dict.fromkeys(keys, nbytes)


# --- one thread, a store that is there ------------------------------------------------------------


def test_what_was_put_comes_back_bit_for_bit_at_every_size(rig):
    keys = new_keys(2 * len(SIZES))
    sizes = dict(zip(keys, SIZES + SIZES[::-1], strict=True))
    stored = {key: content(key, size) for key, size in sizes.items()}
    assert rig.put(stored) == [True] * len(keys)
    random.Random(3).shuffle(keys)
    assert rig.exists(keys) == [True] * len(keys)
    assert rig.get({key: sizes[key] for key in keys}) == [stored[key] for key in keys]


def test_a_slot_of_nothing_but_a_header_and_one_of_odd_length(rig):
    first, second = new_keys(2)
    stored = {first: bytes(512), second: content(second, 777)}
    assert rig.put(stored) == [True, True]
    assert rig.get({second: 777, first: 512}) == [stored[second], stored[first]]


def test_what_is_missing_is_missing_and_its_neighbours_are_not(rig):
    keys = new_keys(9)
    rig.put(chunks(keys[::2]))
    there = [i % 2 == 0 for i in range(9)]
    assert rig.exists(keys) == there
    expected = [content(key, 4096) if ok else None for key, ok in zip(keys, there, strict=True)]
    assert rig.get(lengths(keys)) == expected


def test_the_name_is_shard_and_digest(rig):
    ((shard, digest),) = new_keys(1)
    other = new_keys(1)[0][0]
    rig.put(chunks([(shard, digest)]))
    assert rig.exists([(other, digest), (digest, shard)]) == [False, False]
    assert rig.get(lengths([(other, digest), (digest, shard)])) == [None, None]


@pytest.mark.parametrize("nbytes", [512, 4096 - 512, 4096 - 1, 4096 + 1, 8192])
def test_another_length_is_a_miss_and_takes_nothing_away(rig, nbytes):
    keys = new_keys(2)
    rig.put(chunks(keys))
    assert rig.get({keys[0]: nbytes, keys[1]: 4096}) == [None, content(keys[1], 4096)]
    assert rig.get(lengths(keys)) == [content(key, 4096) for key in keys]


def test_what_is_there_is_not_written_again(rig):
    keys = new_keys(3)
    rig.put(chunks(keys[:2]))
    assert rig.put({key: bytes(4096) for key in keys}) == [True] * 3
    assert rig.get(lengths(keys)) == [*chunks(keys[:2]).values(), bytes(4096)]


def test_what_was_removed_is_missing_and_can_be_put_again(rig):
    keys = new_keys(4)
    rig.put(chunks(keys))
    rig.exists(keys)
    rig.get(lengths(keys))  # somebody has just read it
    rig.tier.remove([*keys[:2], *new_keys(1)])
    assert rig.exists(keys) == [False, False, True, True]
    assert rig.get(lengths(keys))[:2] == [None, None]
    assert rig.put(chunks(keys)) == [True] * 4
    assert rig.get(lengths(keys)) == list(chunks(keys).values())


def test_clear_takes_the_shards_that_are_named_and_no_other(rig):
    shards = [new_keys(7) for _ in range(3)]
    for keys in shards:
        rig.put(chunks(keys))
    rig.tier.clear([shards[0][0][0], shards[2][0][0], bytes(32)])
    assert [rig.exists(keys) for keys in shards] == [[False] * 7, [True] * 7, [False] * 7]
    rig.tier.clear([shards[1][0][0]])
    assert rig.exists(shards[1]) == [False] * 7


def test_clear_of_no_shard_takes_all_that_is_the_tiers_own(rig):
    shards = [new_keys(3) for _ in range(3)]
    for keys in shards:
        rig.put(chunks(keys))
    rig.tier.clear([])
    assert [rig.exists(keys) for keys in shards] == [[False] * 3] * 3
    assert rig.put(chunks(shards[0])) == [True] * 3


def test_calls_that_name_nothing(rig):
    assert (rig.put({}), rig.get({}), rig.exists([])) == ([], [], [])
    rig.tier.remove([])


def test_names_that_are_none_are_refused_before_anything_happens(rig):
    (good,) = new_keys(1)
    place = rig.arena[:512]
    for bad in [(b"", bytes(32)), (bytes(32), bytes(31)), (bytes(33), bytes(32))]:
        for call in (
            lambda bad=bad: rig.tier.exists([good, bad]),
            lambda bad=bad: rig.tier.remove([good, bad]),
            lambda bad=bad: rig.tier.get_into([good, bad], [place, place]),
            lambda bad=bad: rig.tier.put_from([good, bad], [place, place]),
        ):
            with pytest.raises(LocalProtocolError, match="expected ids of 32 bytes"):
                call()
    with pytest.raises(LocalProtocolError, match="expected 1, got 2"):
        rig.tier.put_from([good], [place, place])
    with pytest.raises(LocalProtocolError, match="expected 32 bytes"):
        rig.tier.clear([b"../../etc"])
    assert rig.exists([good]) == [False]


def test_calls_of_more_than_a_batch(rig, monkeypatch):
    for module in (valkey, mooncake):
        monkeypatch.setattr(module, "MOST_NAMES", 7)
        monkeypatch.setattr(module, "MOST_BYTES", 5 * 4096)
    keys = new_keys(40)
    assert rig.put(chunks(keys[:-1])) == [True] * 39
    there = [True] * 39 + [False]
    assert rig.exists(keys) == there
    assert rig.get(lengths(keys)) == [*chunks(keys[:-1]).values(), None]
    rig.tier.remove(keys[:20])
    assert rig.exists(keys) == [False] * 20 + [True] * 19 + [False]
    rig.tier.clear([keys[0][0]])
    assert rig.exists(keys) == [False] * 40


def test_gauges_are_numbers_and_need_no_store(rig):
    assert all(isinstance(value, int) for value in rig.tier.stats().values())


# --- several ---------------------------------------------------------------------------------------


def test_servers_that_share_a_store_find_each_others_chunks(store, rig):
    other = store.open()
    keys = new_keys(6)
    assert rig.put(chunks(keys[:3])) == [True] * 3
    assert other.exists(keys) == [True] * 3 + [False] * 3
    assert other.put(chunks(keys)) == [True] * 6
    assert rig.get(lengths(keys)) == list(chunks(keys).values())
    other.tier.remove(keys[:1])
    assert rig.get(lengths(keys[:1])) == [None]
    rig.tier.clear([keys[0][0]])
    assert other.get(lengths(keys)) == [None] * 6


def test_many_threads_at_once_get_what_was_put_or_nothing(rig):
    shared = new_keys(12)
    problems = []

    def use(number):
        dice = random.Random(number)
        own = chunks(new_keys(4), 65_536)
        with contextlib.suppress(TierUnavailable):
            for _ in range(6):
                mixed = dice.sample(shared, 5)
                for key, place in zip(mixed, places[number], strict=True):
                    place[:] = content(key, 65_536)
                if not all(rig.tier.put_from(mixed, places[number])):
                    problems.append("put")
                mixed = dice.sample(shared, 5)
                got = rig.tier.get_into(mixed, places[number])
                problems.extend(
                    key
                    for key, place, ok in zip(mixed, places[number], got, strict=True)
                    if ok and place != content(key, 65_536)
                )
                if dice.random() < 0.3:
                    rig.tier.remove(dice.sample(shared, 2))
            for place, data in zip(places[number], own.values(), strict=False):
                place[:] = data
            if not all(rig.tier.put_from(list(own), places[number][:4])):
                problems.append("own put")
            for place in places[number]:
                place[:] = bytes(65_536)
            rig.tier.get_into(list(own), places[number][:4])
            if [bytes(place) for place in places[number][:4]] != list(own.values()):
                problems.append("own get")

    places = [[rig.arena[(n * 5 + i) * 65_536 :][:65_536] for i in range(5)] for n in range(8)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(use, range(8)))
    assert problems == []


def test_any_sequence_of_calls_is_like_a_dict(rig, full):
    class Machine(RuleBasedStateMachine):
        def __init__(self):
            super().__init__()
            self.shards = [new_keys(1)[0][0] for _ in range(2)]
            self.model = {}

        def key(self, number):
            return self.shards[number % 2], bytes([number]) * 32

        numbers = st.lists(st.integers(0, 9), max_size=5, unique=True)

        @rule(numbers=numbers, blocks=st.sampled_from([1, 2, 17]))
        def put(self, numbers, blocks):
            keys = [self.key(n) for n in numbers if self.model.get(self.key(n), blocks) == blocks]
            assert rig.put(chunks(keys, 512 * blocks)) == [True] * len(keys)
            self.model |= dict.fromkeys(keys, blocks)

        @rule(numbers=numbers, blocks=st.sampled_from([1, 2, 17]))
        def get(self, numbers, blocks):
            keys = [self.key(n) for n in numbers]
            assert rig.get(lengths(keys, 512 * blocks)) == [
                content(key, 512 * blocks) if self.model.get(key) == blocks else None
                for key in keys
            ]

        @rule(numbers=numbers)
        def remove(self, numbers):
            rig.tier.remove([self.key(n) for n in numbers])
            for number in numbers:
                self.model.pop(self.key(number), None)

        @rule(number=st.integers(0, 1))
        def clear(self, number):
            rig.tier.clear([self.shards[number]])
            self.model = {k: v for k, v in self.model.items() if k[0] != self.shards[number]}

        @invariant()
        def exists(self):
            keys = [self.key(n) for n in range(10)]
            assert rig.exists(keys) == [key in self.model for key in keys]

    run_state_machine_as_test(Machine, settings=machine_settings(full))


def machine_settings(full):
    from hypothesis import settings

    return settings(max_examples=500 if full else 20, stateful_step_count=20)


# --- away, and back --------------------------------------------------------------------------------


def timed(call):
    """What it returns, or TierUnavailable; it ends within the bound."""
    began = time.monotonic()
    try:
        result = call()
    except TierUnavailable as error:
        result = error
    assert time.monotonic() - began < BOUND
    return result


def is_away(rig):
    (key,) = new_keys(1)
    place = rig.arena[:512]
    for call in (
        lambda: rig.tier.exists([key]),
        lambda: rig.tier.get_into([key], [place]),
        lambda: rig.tier.put_from([key], [place]),
        lambda: rig.tier.remove([key]),
        lambda: rig.tier.clear([key[0]]),
    ):
        assert isinstance(timed(call), TierUnavailable)


def works(rig):
    """Can it be used, within the bound?"""
    keys = new_keys(3)
    with contextlib.suppress(TierUnavailable):
        return rig.put(chunks(keys)) == [True] * 3 and rig.get(lengths(keys)) == list(
            chunks(keys).values()
        )
    return False


def test_a_service_that_is_killed_amid_traffic_is_missed_in_time_and_found_again(mortal):
    rig = mortal.open()
    assert works(rig)
    keys = new_keys(4)
    stop, killed, outcomes = threading.Event(), threading.Event(), []

    def traffic():
        while not stop.is_set():
            after = killed.is_set()
            outcomes.append((after, timed(lambda: (rig.put(chunks(keys)), rig.get(lengths(keys))))))
            if not after and len(outcomes) == 5:
                flowing.set()

    flowing = threading.Event()
    thread = threading.Thread(target=traffic)
    thread.start()
    try:
        assert flowing.wait(BOUND)
        mortal.service.kill()
        killed.set()
        wait_until(lambda: any(after for after, _ in outcomes), seconds=2 * BOUND)
    finally:
        stop.set()
        thread.join()
    for after, outcome in outcomes:
        if isinstance(outcome, TierUnavailable):
            continue
        assert not after
        for key, got in zip(keys, outcome[1], strict=True):
            assert got in (None, content(key, 4096))
    is_away(rig)
    mortal.service.start()
    wait_until(lambda: works(rig), seconds=3 * BOUND)


def test_a_service_that_hangs_is_missed_in_time_and_found_again(mortal):
    rig = mortal.open()
    assert works(rig)
    mortal.service.pause()
    is_away(rig)
    mortal.service.resume()
    wait_until(lambda: works(rig), seconds=3 * BOUND)


def test_a_service_that_is_not_there_yet(mortal):
    mortal.service.kill()
    rig = mortal.open()
    is_away(rig)
    mortal.service.start()
    wait_until(lambda: works(rig), seconds=3 * BOUND)


# --- closing ---------------------------------------------------------------------------------------


def held():
    gc.collect()
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("name", STORES)
def test_a_tier_that_is_closed_leaves_no_thread_and_no_descriptor(name):
    with opened(name) as store:

        def once():
            rig = store.open()
            assert works(rig)
            rig.close()
            rig.close()  # a second time changes nothing

        once()
        before = held()
        for _ in range(2):
            once()
        wait_until(lambda: all(now <= then for now, then in zip(held(), before, strict=True)))


def test_a_tier_that_is_closed_cannot_be_used(store):
    rig = store.open()
    assert works(rig)
    rig.close()
    is_away(rig)


def test_a_tier_that_was_never_used_can_be_closed(store):
    store.open().close()


def test_closing_while_others_are_using_it_harms_nobody(store):
    rig = store.open()
    keys = new_keys(4)
    rig.put(chunks(keys))
    started = threading.Barrier(5)

    def use(number):
        places = [rig.arena[(number * 4 + i) * 4096 :][:4096] for i in range(4)]
        started.wait()
        while True:
            try:
                got = rig.tier.get_into(keys, places)
            except TierUnavailable:
                return
            for key, place, ok in zip(keys, places, got, strict=True):
                assert not ok or place == content(key, 4096)

    with ThreadPoolExecutor(4) as pool:
        users = [pool.submit(use, number) for number in range(4)]
        started.wait()
        rig.close()
        for user in users:
            user.result(BOUND)
