"""Names of chunks: the same everywhere, different whenever the bytes could be."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_kernels.errors import ConfigError, LayoutError
from lmcache_kernels.transfer.keys import ChunkChain, Span, root_digest, shard_id

ROOT = root_digest(model="m", chunk_tokens=4)


def digests(tokens, root=ROOT, spans=(), chunk_tokens=4):
    return ChunkChain(root, chunk_tokens, spans).extend(tokens)


SCRIPT = """
from lmcache_kernels.transfer.keys import *
root = root_digest(model="org/model", chunk_tokens=32, adapter="a", salt="s", dtype="bfloat16")
chain = ChunkChain(root, 32, [Span("image", 40, 8)])
print(*[d.hex() for d in chain.extend(list(range(1000, 1064)))])
print(shard_id(bytes(32), index=1, count=4, stage=0, stages=2).hex())
"""


def test_fault_g01_names_are_the_same_in_every_process():
    """No process-wide hash seed takes part: three processes with other seeds agree."""
    seen = set()
    for seed in (None, "0", "random"):
        env = {k: v for k, v in os.environ.items() if k != "PYTHONHASHSEED"}
        if seed is not None:
            env["PYTHONHASHSEED"] = seed
        seen.add(
            subprocess.run(
                [sys.executable, "-c", SCRIPT],
                env=env,
                check=True,
                capture_output=True,
                text=True,
                timeout=60,
            ).stdout
        )
    assert len(seen) == 1
    first, second = seen.pop().splitlines()
    assert [len(bytes.fromhex(word)) for word in first.split()] == [32, 32]
    assert len(bytes.fromhex(second)) == 32


def test_names_are_pinned():
    """A change of any of these loses every cache in the field: raise KEY_VERSION on purpose."""
    assert ROOT.hex() == PINNED_ROOT
    assert digests([1, 2, 3, 4])[0].hex() == PINNED_CHUNK
    assert shard_id(bytes(32), index=0, count=1).hex() == PINNED_SHARD


PINNED_ROOT = "79080f1cab5007b607581a7b7ef679af4869fca57b08882ee60859fd73670436"
PINNED_CHUNK = "605e3291250f88073e7ed710a502c2bd1658508d9cd4c91e8115f467dcd111c8"
PINNED_SHARD = "d5637d2bc504947b908b659dba86a358e60e370fa00d4e1425c3961cca05e146"


@pytest.mark.parametrize(
    "change",
    [{"model": "n"}, {"adapter": "a"}, {"salt": "s"}, {"dtype": "fp8"}, {"chunk_tokens": 8}],
    ids=lambda change: next(iter(change)),
)
def test_everything_a_chunk_depends_on_is_in_its_name(change):
    assert root_digest(**{"model": "m", "chunk_tokens": 4, **change}) != ROOT


def test_fields_cannot_run_into_each_other():
    one = root_digest(model="m", chunk_tokens=4, adapter="ab", salt="c")
    other = root_digest(model="m", chunk_tokens=4, adapter="a", salt="bc")
    assert one != other


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.integers(0, 40))
def test_only_whole_chunks_are_named_and_growth_changes_nothing(tokens, cut):
    chain = ChunkChain(ROOT, 4)
    early = list(chain.extend(tokens[:cut]))
    whole = chain.extend(tokens)
    assert len(whole) == len(tokens) // 4
    assert whole[: len(early)] == early
    assert whole == digests(tokens)


@given(st.lists(st.integers(0, 100), min_size=8, max_size=24), st.integers(0, 23))
def test_a_changed_token_changes_its_chunk_and_all_after_it(tokens, position):
    position %= len(tokens)
    changed = list(tokens)
    changed[position] += 1
    before, after = digests(tokens), digests(changed)
    first = position // 4
    assert before[:first] == after[:first]
    assert all(a != b for a, b in zip(before[first:], after[first:], strict=True))


def test_multimodal_items_change_every_chunk_they_overlap_and_only_from_there_on():
    tokens = [7] * 16
    plain = digests(tokens)
    image = digests(tokens, spans=[Span("cat", 5, 5)])
    assert image[0] == plain[0]
    assert image[1] != plain[1]
    assert image[2] != plain[2]
    assert image == digests(tokens, spans=[Span("cat", 5, 5)])
    assert image[1] != digests(tokens, spans=[Span("dog", 5, 5)])[1]
    assert image[1] != digests(tokens, spans=[Span("cat", 6, 5)])[1]


def test_fault_g03_images_are_told_apart_by_all_of_their_hash_and_by_where_they_are():
    """Two whose hashes end alike, with the same placeholders for tokens; and one that moves."""
    tokens = [7] * 24
    cat, dog = "8c2f" * 15 + "beef", "01d7" * 15 + "beef"
    near = cat[:-1] + "e"  # nor is a beginning enough

    def named(*spans):
        return digests(tokens, spans=[Span(*span) for span in spans])

    first = named((cat, 5, 9))
    for other in (named((dog, 5, 9)), named((near, 5, 9)), named((cat, 6, 9)), named((cat, 5, 8))):
        assert other[0] == first[0]
        assert not {*other[1:]} & {*first[1:]}, "from the first chunk that the image overlaps on"
    assert named((cat, 5, 9)) == first, "the same request again finds everything"
    assert named((cat, 5, 4), (dog, 9, 4))[2:] != named((dog, 5, 4), (cat, 9, 4))[2:]


def test_mp_d31_names_of_models_may_be_any_text():
    names = ["org/model", "org@model", "a\\b", "a\0b", "x" * 4096, "模型 🦙", "", "/", "@"]
    assert len({root_digest(model=name, chunk_tokens=4) for name in names}) == len(names)


def test_mp_d30_ranks_beyond_what_a_byte_holds_stay_apart():
    """As many ranks and stages as one likes, each with a shard of its own."""
    counts = (1, 2, 255, 256, 257, 512, 1 << 16, (1 << 16) + 1, 1 << 32)
    parts = [
        {"index": index, "count": count, "stage": stage, "stages": stages}
        for count in counts
        for index in {0, 1, 255, 256, 257, 65_536, count - 1}
        for stages in (1, 257, 1 << 16)
        for stage in {0, 1, 256, stages - 1}
        if index < count and stage < stages
    ]
    assert len({shard_id(bytes(32), **part) for part in parts}) == len(parts) > 300


@pytest.mark.parametrize("bad", [-1, 2**32, 1.5, "x"])
def test_bad_token_ids_are_refused(bad):
    with pytest.raises(LayoutError, match="token ids"):
        digests([1, 2, 3, bad])


def test_shards_differ_by_slice_stage_and_form():
    assert (
        len(
            {
                shard_id(bytes(32), index=0, count=1),
                shard_id(bytes(32), index=0, count=2),
                shard_id(bytes(32), index=1, count=2),
                shard_id(bytes(32), index=0, count=1, stage=1, stages=2),
                shard_id(bytes(31) + b"x", index=0, count=1),
                shard_id(bytes(32), index=0, count=1, layers=[["a", "b"]]),
                shard_id(bytes(32), index=0, count=1, layers=[["a"], ["b"]]),
            }
        )
        == 7
    )
    with pytest.raises(ConfigError, match="index"):
        shard_id(bytes(32), index=2, count=2)
    with pytest.raises(ConfigError, match="stage"):
        shard_id(bytes(32), index=0, count=1, stage=-1)
