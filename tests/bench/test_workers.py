"""Payloads that follow from their names, and prompts of which some are frequent."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from bench.workers.payloads import Payloads, Prompts

SIZE = 4096
NAME, OTHER = bytes(range(32)), bytes(range(1, 33))


@pytest.fixture
def payloads():
    return Payloads(SIZE)


@pytest.fixture
def written(payloads):
    place = bytearray(SIZE)
    payloads.write(memoryview(place), NAME)
    return place


def test_what_was_written_is_what_is_there(payloads, written):
    assert payloads.is_at(memoryview(written), NAME)
    assert Payloads(SIZE).is_at(memoryview(written), NAME)  # in another process, too


def test_another_chunk_is_not(payloads, written):
    assert not payloads.is_at(memoryview(written), OTHER)


@pytest.mark.parametrize("bit", [0, 8 * SIZE // 2 + 3, 8 * SIZE - 1])
def test_one_bit_is_seen(payloads, written, bit):
    written[bit // 8] ^= 1 << bit % 8
    assert not payloads.is_at(memoryview(written), NAME)


@pytest.mark.parametrize("moved", [8, 32, 512])
def test_the_same_bytes_at_another_place_are_seen(payloads, written, moved):
    shifted = written[moved:] + written[:moved]
    assert not payloads.is_at(memoryview(shifted), NAME)


def test_prompts_of_a_family_begin_alike_and_end_unlike():
    prompts = Prompts(8, count=6, families=2)
    one, relative, stranger = prompts.digests(0), prompts.digests(2), prompts.digests(1)
    assert one[:4] == relative[:4]
    assert not set(one[4:]) & set(relative[4:])
    assert not set(one) & set(stranger)
    assert len(set(one)) == 8
    assert Prompts(8, count=6, families=2).digests(0) == one


def test_some_prompts_are_frequent():
    prompts, chance = Prompts(2, count=100, families=1), random.Random(1)
    drawn = Counter(prompts.draw(chance)[1] for _ in range(2000))
    assert drawn[prompts.digests(0)[1]] > 5 * drawn[prompts.digests(20)[1]] > 0
