"""A latent cache (MLA), of which every rank has all: one stores, all load, whatever their number."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch
from cachekit import BY_NAME, make_cache, oracle_chunk, untouched_outside
from gate_port import GatePort

from lmcache_kernels.adapters.vllm.identity import slice_of
from lmcache_kernels.adapters.vllm.jobs import LoadJob, StepJobs, StoreJob
from lmcache_kernels.adapters.vllm.worker import WorkerSide
from lmcache_kernels.transfer.context_factory import create_transfer_context
from lmcache_kernels.transfer.embedded import EmbeddedCache
from lmcache_kernels.transfer.kv_groups import KVGroup
from lmcache_kernels.transfer.messages import Found, Lookup, PrepareRetrieve, PrepareStore

CHUNK = 8  # two blocks of four tokens
DIGESTS = [bytes([n]) * 32 for n in range(3)]
BLOCKS = [11, 9, 7, 12, 14, 20]


class Engine:
    """Ranks with a cache and a worker each; those that share heads have the same content."""

    def __init__(self, closing, server, tp, *, mla, seed):
        self.port = GatePort(server)
        self.ranks = []
        for rank in range(tp):
            cache = make_cache(BY_NAME["latent" if mla else "kv_first_nhd"], blocks=24)
            cache.fill_random(seed if mla else seed + rank)
            held = slice_of(
                tp_rank=rank, tp_size=tp, pp_rank=0, pp_size=1, total_kv_heads=8, mla=mla
            )
            context = create_transfer_context(
                [KVGroup.of(cache.tensors, cache.axes)],
                chunk_tokens=CHUNK,
                part=held.part([["a", "b"]]),
                port=self.port,
            )
            closing.callback(context.close)
            self.ranks.append((WorkerSide(context, writer=held.writer, pages=[1]), cache))
            self.shards = list(dict.fromkeys([*getattr(self, "shards", []), context.shard]))

    @property
    def caches(self):
        return [cache for _, cache in self.ranks]

    def step(self, jobs):
        for worker, _ in self.ranks:
            worker.begin_step(jobs)
            worker.start_loads(jobs)
            worker.start_stores()
            worker.poll()
            report = worker.take_report()
            assert len(report.over) == 1
            assert not report.failed

    def store(self):
        self.step(StepJobs(stores=[StoreJob(1, DIGESTS, [BLOCKS])]))

    def load(self):
        self.step(StepJobs(loads=[LoadJob(2, "r", DIGESTS, [BLOCKS], 0, synchronous=True)]))

    def hit(self):
        asked = Lookup(request="r", shards=self.shards, digests=b"".join(DIGESTS))
        found = self.port.request(asked, 1.0).result(1.0)
        assert isinstance(found, Found)
        return found.chunks


@pytest.fixture
def closing():
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def server(closing):
    return closing.enter_context(EmbeddedCache(1 << 20, chunk_tokens=CHUNK))


@pytest.mark.parametrize("tp", [1, 4, 8])
def test_fault_g06_one_rank_stores_a_latent_cache_and_all_ranks_of_any_engine_load_it(
    closing, server, tp
):
    """Four ranks have stored it once; as many as there are load it, bit by bit."""
    storing = Engine(closing, server, 4, mla=True, seed=1)
    assert len(storing.shards) == 1
    storing.store()
    assert len(storing.port.of(PrepareStore)) == 1
    assert server.stats()["stored"] == 3
    loading = Engine(closing, server, tp, mla=True, seed=2)
    assert loading.shards == storing.shards
    assert loading.hit() == 3
    before = [cache.snapshot() for cache in loading.caches]
    loading.load()
    assert len(loading.port.of(PrepareRetrieve)) == tp
    assert server.stats()["loaded"] == 3 * tp
    for cache, snapshot in zip(loading.caches, before, strict=True):
        assert torch.equal(oracle_chunk(cache, BLOCKS), oracle_chunk(storing.caches[0], BLOCKS))
        assert untouched_outside(cache, snapshot, BLOCKS)


def test_fault_g06_heads_that_are_split_otherwise_are_not_found(closing, server):
    """Of a model whose ranks each hold a part, another number of ranks has other parts."""
    storing = Engine(closing, server, 4, mla=False, seed=1)
    assert len(storing.shards) == 4
    storing.store()
    assert storing.hit() == 3
    assert len(storing.port.of(PrepareStore)) == 4
    for tp in (1, 2, 8):
        other = Engine(closing, server, tp, mla=False, seed=2)
        assert other.hit() == 0
        assert not {*other.shards} & {*storing.shards}
