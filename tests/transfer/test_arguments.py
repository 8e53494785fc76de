"""Slips that a caller makes are refused in one sentence that names the argument, before anything."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from lmcache_kernels.errors import ConfigError, KVTransferError, LayoutError
from lmcache_kernels.transfer import (
    ChunkChain,
    EmbeddedCache,
    EngineDrivenContext,
    PeerCopy,
    PeerTarget,
    create_transfer_context,
    root_digest,
    shard_id,
    wrap_kv_caches,
)
from lmcache_kernels.transfer.cache_forms import ShardPart
from lmcache_kernels.transfer.kv_groups import KVGroup
from lmcache_kernels.views import group_of, plane_of

AXES = "kv block token head dim"
CHUNK = 8
WAIT = 30.0
NAMES = [bytes([number]) * 32 for number in range(2)]


@pytest.fixture
def port():
    with EmbeddedCache(1 << 18, chunk_tokens=CHUNK) as cache:
        yield cache


@pytest.fixture
def tensors():
    return [torch.zeros(2, 8, 4, 2, 4, dtype=torch.float16) for _ in range(2)]


def engine_driven(port, tensors, /, **changed):
    arguments = {
        "groups": [group_of(tensors, AXES)],
        "chunk_tokens": CHUNK,
        "shard": lambda layout: shard_id(layout.fingerprint, index=0, count=1),
        "port": port,
    }
    return EngineDrivenContext(**{**arguments, **changed})


def by_mode(mode, port, tensors, /, **changed):
    arguments = {
        "kv_caches": [KVGroup.of(tensors, AXES)],
        "mode": mode,
        "chunk_tokens": CHUNK,
        "part": ShardPart(),
        "port": port,
    }
    return create_transfer_context(**{**arguments, **changed})


MAKERS = {
    "class": engine_driven,
    "engine_driven": partial(by_mode, "engine_driven"),
    "lmcache_driven": partial(by_mode, "lmcache_driven"),
}


@pytest.fixture(params=MAKERS)
def make(request):
    return MAKERS[request.param]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"port": None}, "port: expected a cache, .*, got None"),
        ({"port": "tcp://localhost:5555"}, "port: expected a cache, .*, got 'tcp:"),
        ({"chunk_tokens": "8"}, "chunk_tokens: expected an integer >= 1, got '8'"),
        ({"chunk_tokens": 0}, "chunk_tokens: expected an integer >= 1, got 0"),
        ({"chunk_tokens": 16}, "chunk_tokens: expected 8, as the cache has, got 16"),
        ({"instance": "one"}, "instance: expected an integer from 0 to .*, got 'one'"),
        ({"instance": -1}, "instance: .*, got -1"),
        ({"instance": 1 << 63}, "instance: .*, got 9223372036854775808"),
        ({"instance": True}, "instance: .*, got True"),
    ],
)
def test_settings_of_another_kind_are_refused_by_every_context(
    make, port, tensors, changed, message
):
    with pytest.raises(ConfigError, match=message):
        make(port, tensors, **changed)
    assert not any(tensor.is_shared() for tensor in tensors)
    assert port.stats()["workers"] == 0


@pytest.mark.parametrize("shard", [None, lambda layout: None, lambda layout: b"short", bytes(32)])
def test_a_shard_that_names_nothing_is_refused(port, tensors, shard):
    with pytest.raises(ConfigError, match="shard: expected a function that returns 32 bytes"):
        engine_driven(port, tensors, shard=shard)


@pytest.mark.parametrize("mode", ["engine_driven", "lmcache_driven"])
def test_a_part_or_a_mode_of_another_kind_is_refused(port, tensors, mode):
    with pytest.raises(ConfigError, match="part: expected a ShardPart, got NoneType"):
        by_mode(mode, port, tensors, part=None)
    with pytest.raises(ConfigError, match=r"transfer mode: expected one of .*, got 256"):
        by_mode(256, port, tensors)


def test_groups_that_are_none_are_refused(port, tensors):
    group, described = group_of(tensors, AXES), KVGroup.of(tensors, AXES)
    for call, message in (
        (lambda: engine_driven(port, tensors, groups=group), "groups: .*, got CacheGroup"),
        (lambda: engine_driven(port, tensors, groups=tensors), r"groups\[0\]: .*, got Tensor"),
        (lambda: engine_driven(port, tensors, groups=tensors[0]), "groups: .*, got Tensor"),
        (lambda: PeerCopy(group, b"", lambda theirs: []), "groups: .*, got CacheGroup"),
        (lambda: PeerCopy(tensors, b"", lambda theirs: []), r"groups\[0\]: .*, got Tensor"),
        *(
            (lambda mode=mode, groups=groups: by_mode(mode, port, tensors, kv_caches=groups), text)
            for mode in ("engine_driven", "lmcache_driven")
            for groups, text in (
                (described, "kv_caches: expected a list of KVGroup, got KVGroup"),
                ([group], r"kv_caches\[0\]: expected a KVGroup, got CacheGroup"),
                (tensors, r"kv_caches\[0\]: expected a KVGroup, got Tensor"),
            )
        ),
    ):
        with pytest.raises(LayoutError, match=message):
            call()


@pytest.mark.parametrize("make_group", [group_of, plane_of, KVGroup.of])
def test_axes_and_tensors_that_are_swapped_are_refused(make_group, tensors):
    for wrong in (tensors, tensors[0], None):
        with pytest.raises(
            LayoutError, match=f"axes: expected words.*, got {type(wrong).__name__}"
        ):
            make_group(AXES, wrong)


@pytest.mark.parametrize("share", [PeerTarget, wrap_kv_caches])
def test_caches_without_names_are_refused(share, tensors):
    with pytest.raises(LayoutError, match="kv_caches: expected tensors by name, got list"):
        share(tensors)


def test_the_sizes_of_a_cache_are_integers():
    for arguments, message in (
        ({"arena_bytes": 1e9}, "arena_bytes: expected an integer >= 1, got 1000000000.0"),
        ({"arena_bytes": 0}, "arena_bytes: .*, got 0"),
        ({"arena_bytes": 1 << 20, "chunk_tokens": "256"}, "chunk_tokens: .*, got '256'"),
        ({"arena_bytes": 1 << 20, "chunk_tokens": 0}, "chunk_tokens: .*, got 0"),
    ):
        with pytest.raises(ConfigError, match=message):
            EmbeddedCache(**arguments)


@pytest.mark.parametrize("tokens", ["256", 0, 2.5, None])
def test_names_are_of_whole_tokens(tokens):
    with pytest.raises(ConfigError, match="chunk_tokens: expected an integer >= 1"):
        root_digest(model="m", chunk_tokens=tokens)
    with pytest.raises(ConfigError, match="chunk_tokens: expected an integer >= 1"):
        ChunkChain(bytes(32), tokens)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((NAMES, None), {}, "block_ids: expected a list, got NoneType"),
        ((None, [[0]]), {}, "digests: expected a list, got NoneType"),
        ((NAMES, [[0, 1, 2, 3]]), {"skip_first_n_tokens": -1}, "skip_first_n_tokens: .*, got -1"),
        ((NAMES, [[0, 1, 2, 3]]), {"skip_first_n_tokens": "4"}, "skip_first_n_tokens: .*, got '4'"),
        ((NAMES, [[0, 1, 2, 3]]), {"skip_first_n_tokens": 4.0}, "skip_first_n_tokens: .*, got 4.0"),
    ],
)
def test_what_is_no_transfer_is_refused_when_it_is_submitted(
    make, port, tensors, arguments, options, message
):
    context = make(port, tensors)
    submits = (
        [context.submit_retrieve] if options else [context.submit_retrieve, context.submit_store]
    )
    for submit in submits:
        with pytest.raises(LayoutError, match=message):
            submit(*arguments, **options)
    context.close()


def test_workers_without_a_number_get_one_of_their_own(make, port, tensors):
    contexts = [make(port, tensors) for _ in range(2)]
    assert len({context.instance for context in contexts}) == 2
    for context in contexts:
        context.register()
    assert port.stats()["workers"] == 2
    assert make(port, tensors, instance=7).instance == 7
    for context in contexts:
        context.close()


class Unreached:
    """A cache whose chunks are only known once its server was reached."""

    def __init__(self, cache):
        self.cache, self.chunk_tokens = cache, None

    def __getattr__(self, name):
        return getattr(self.cache, name)

    def request(self, message, timeout):
        raise AssertionError(message)


def test_a_cache_that_turns_out_to_have_other_chunks_is_asked_for_nothing(make, port, tensors):
    late = Unreached(port)
    context = make(late, tensors)
    late.chunk_tokens = 16
    message = "chunk_tokens: expected 16, as the cache has, got 8"
    with pytest.raises(ConfigError, match=message):
        context.register()
    for result in (
        context.submit_store(NAMES, [[0, 1, 2, 3]]).result,
        context.submit_retrieve(NAMES, [[0, 1, 2, 3]]),
    ):
        assert isinstance(error := result.exception(WAIT), KVTransferError)
        assert message in str(error)
    context.close()


def test_a_chunk_that_is_named_twice_moves_nothing(make, port, tensors):
    context = make(port, tensors)
    blocks = [[0, 1, 2, 3, 4, 5]]
    for twice, where in (([0, 0, 1], 1), ([0, 1, 0], 2)):
        digests = [NAMES[number] for number in twice]
        for result in (
            context.submit_store(digests, blocks).result,
            context.submit_retrieve(digests, blocks),
        ):
            with pytest.raises(LayoutError, match=rf"digests\[{where}\]: named twice"):
                result.result(WAIT)
    assert port.stats()["resident"] == 0
    context.close()


def test_a_step_may_store_one_chunk_for_several_requests(port, tensors):
    """Two requests of one prompt, whose blocks hold the same."""
    context = engine_driven(port, tensors)
    store = context.submit_layered_store([NAMES[0], NAMES[0], NAMES[1]], [range(6)], [[0, 1]])
    store.saved(1)
    assert store.result.result(WAIT) == 2
    assert context.submit_retrieve(NAMES, [range(4)]).result(WAIT) == 2
    context.close()
