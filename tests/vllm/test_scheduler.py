"""The scheduler's half, hook by hook, with a cache that answers when the test says so."""

from __future__ import annotations

import pytest
from enginekit import Request, ScriptedPort, step_output

from lmcache_kernels.adapters.vllm.config import ConnectorConfig
from lmcache_kernels.adapters.vllm.jobs import StepReport
from lmcache_kernels.adapters.vllm.scheduler import SchedulerSide
from lmcache_kernels.adapters.vllm.tenant import salt_for_digests, tenant_of
from lmcache_kernels.adapters.vllm.tracker import GroupShape
from lmcache_kernels.errors import PeerGone, TransferTimeout
from lmcache_kernels.ids import ABSENT
from lmcache_kernels.transfer.keys import ChunkChain, root_digest
from lmcache_kernels.transfer.messages import (
    Clear,
    EndSession,
    Lookup,
    is_tenant,
    split_digests,
)

CHUNK = 64
BLOCK = 16
ONE_GROUP = (GroupShape(BLOCK),)


@pytest.fixture
def port():
    return ScriptedPort()


def make(port, *, groups=ONE_GROUP, workers=1, chunk_size=CHUNK, **settings):
    side = SchedulerSide(
        ConnectorConfig(chunk_size=chunk_size, **settings),
        port,
        model="m",
        kv_dtype="bfloat16",
        groups=groups,
        workers=workers,
    )
    side.shards = [b"s" * 32]
    return side


def ask(side, port, request, chunks, local=0):
    """The engine asks until it is answered; the server holds ``chunks``."""
    assert side.matched_tokens(request, local) == (None, False)
    port.answer(chunks)
    return side.matched_tokens(request, local)


def blocks_for(tokens, first=100):
    return (list(range(first, first + -(-tokens // BLOCK))),)


def sessions(port):
    return [message.request for message in port.of(Lookup)]


def ended(port):
    return [message.request for message in port.of(EndSession)]


def over(*jobs, failed=()):
    return StepReport(dict.fromkeys(jobs, 1), set(failed))


def test_a_lookup_is_sent_once_and_polled_without_blocking(port):
    side = make(port)
    request = Request("a", list(range(300)))
    for _ in range(5):
        assert side.matched_tokens(request, 0) == (None, False)
    (lookup,) = port.of(Lookup)
    assert len(lookup.digests) == 32 * (300 // CHUNK)
    port.answer(3)
    assert side.matched_tokens(request, 0) == (3 * CHUNK, True)
    # The local hit may shrink between calls; every answer is counted against the one given.
    assert side.matched_tokens(request, 128) == (3 * CHUNK - 128, True)
    assert side.matched_tokens(request, 32) == (3 * CHUNK - 32, True)
    assert len(port.of(Lookup)) == 1


def test_mp_086_no_answer_while_the_lookup_runs_then_its_hit_as_often_as_the_engine_asks(port):
    """One question and one answer: there is no job at the server that an answer uses up."""
    side = make(port)
    request = Request("a", list(range(300)))
    assert [side.matched_tokens(request, 0) for _ in range(3)] == [(None, False)] * 3
    port.answer(2)
    assert [side.matched_tokens(request, 0) for _ in range(3)] == [(2 * CHUNK, True)] * 3
    assert len(port.of(Lookup)) == 1
    side.finished("a")
    assert ended(port) == sessions(port)
    assert ask(side, port, request, 0) == (0, False), "the same id again asks again"
    assert len(port.of(Lookup)) == 2


@pytest.mark.parametrize("error", [PeerGone("gone"), TransferTimeout("slow")])
def test_a_lookup_that_fails_is_a_miss_for_good(port, error):
    side = make(port)
    request = Request("a", list(range(300)))
    assert side.matched_tokens(request, 0) == (None, False)
    port.fail(error)
    for _ in range(3):
        assert side.matched_tokens(request, 0) == (0, False)
    assert len(port.of(Lookup)) == 1


def test_the_lookup_deadline_is_short(port):
    side = make(port)
    side.matched_tokens(Request("a", list(range(300))), 0)
    assert port.sent[0][1] == 2.0


@pytest.mark.parametrize("local", [0, 512])
@pytest.mark.parametrize("load_async", [True, False])
def test_fault_c07_a_full_hit_leaves_a_token_to_compute(port, local, load_async):
    """A prompt that is stored whole: something must be left to sample from."""
    side = make(port, load_async=load_async)
    request = Request("a", list(range(1024)))
    external, is_async = ask(side, port, request, 1024 // CHUNK, local)
    assert external + local == 1023
    assert is_async is load_async
    side.allocated("a", blocks_for(1024), external)
    (load,) = side.build_step(step_output()).loads
    assert len(load.digests) == 1024 // CHUNK - local // CHUNK


def test_a_full_hit_on_several_groups_stays_on_a_block_boundary(port):
    side = make(port, groups=(GroupShape(16), GroupShape(32, window=64)))
    request = Request("a", list(range(128)))
    assert ask(side, port, request, 2) == (96, True)
    side.allocated("a", (list(range(1, 7)), [7, 8, 9]), 96)
    (load,) = side.build_step(step_output()).loads
    assert load.block_ids == [[1, 2, 3, 4, 5, 6, ABSENT, ABSENT], [7, 8, 9, ABSENT]]


def test_engines_at_one_server_never_share_a_session(port):
    for side in (make(port), make(port)):
        for name in ("0", "x" * 5000):
            side.matched_tokens(Request(name, list(range(CHUNK))), 0)
    assert len(set(sessions(port))) == 4
    assert max(map(len, sessions(port))) < 100


@pytest.mark.parametrize(("window", "stored"), [(200, 1), (40, 0)])
def test_a_chunk_whose_blocks_may_have_left_the_window_is_not_stored(port, window, stored):
    """The engine frees them while it computes the rest of the chunk, and may hand them to others;
    nobody tells us."""
    side = make(port, groups=(GroupShape(BLOCK), GroupShape(BLOCK, window)))
    request = Request("a", list(range(CHUNK)))
    ask(side, port, request, 0)
    tables = (list(range(1, 5)), list(range(11, 15)))
    side.allocated("a", (tables[0][:3], tables[1][:3]), 0)
    first = step_output(new=[("a", (tables[0][:3], tables[1][:3]), 0, 48)])
    assert side.build_step(first).stores == []
    more = (tables[0][3:], tables[1][3:])
    step = side.build_step(step_output(cached=[("a", more, 48, 16, False)]))
    assert len(step.stores) == stored


def test_less_stored_than_found_locally_loads_nothing_and_lets_go(port):
    side = make(port)
    request = Request("a", list(range(300)))
    assert ask(side, port, request, 2, local=128) == (0, False)
    side.allocated("a", blocks_for(300), 0)
    assert ended(port) == sessions(port)
    side.finished("a")
    assert len(port.of(EndSession)) == 1


def test_fault_a14_a_hit_that_adds_no_chunk_rewrites_nothing(port):
    """14816 tokens are here and 14820 there: both end in chunk 57 of 256 tokens, and the blocks that
    the engine owns already stay as they are."""
    side = make(port, chunk_size=256)
    request = Request("a", list(range(14821)))
    assert ask(side, port, request, 14820 // 256, local=14816) == (0, False)
    side.allocated("a", blocks_for(14821), 0)
    assert side.build_step(step_output()).loads == []


def test_a_load_names_the_chunks_and_blocks_and_spares_local_ones(port):
    side = make(port)
    request = Request("a", list(range(300)))
    local = CHUNK + BLOCK
    external, _ = ask(side, port, request, 4, local=local)
    assert external == 4 * CHUNK - local
    side.allocated("a", blocks_for(4 * CHUNK), external)
    (load,) = side.build_step(step_output()).loads
    per_chunk = CHUNK // BLOCK
    assert load.block_ids == [list(range(100 + per_chunk, 100 + 4 * per_chunk))]
    assert load.skip_tokens == BLOCK
    assert len(load.digests) == 3
    assert side.build_step(step_output()).loads == []


def test_mp_100_fault_a10_the_null_block_of_a_window_is_absent_and_keeps_a_chunk_from_being_stored(
    port,
):
    """Blocks that left the window all have id 0: never written, never stored as if they held data."""
    side = make(port, groups=(GroupShape(BLOCK), GroupShape(BLOCK, window=40)))
    request = Request("a", list(range(200)))
    external, is_async = ask(side, port, request, 2)
    assert is_async  # also when configured otherwise: several groups cannot load inside a step
    full, windowed = list(range(1, 13)), [0, 0, 0, 0, 0, 0, 23, 24, 25, 26, 27, 28]
    side.allocated("a", (full[:8], windowed[:8]), external)
    (load,) = side.build_step(step_output()).loads
    assert load.block_ids == [full[:8], [ABSENT] * 6 + [23, 24]]
    side.report(over(load.job_id))
    side.allocated("a", (full, windowed), 0)
    step = side.build_step(step_output(new=[("a", (full, windowed), 128, 72)]))
    (store,) = step.stores
    assert store.block_ids == [full[8:12], windowed[8:12]]


def test_fault_a10_block_zero_is_an_ordinary_block_without_a_window(port):
    side = make(port)
    request = Request("a", list(range(70)))
    assert ask(side, port, request, 0) == (0, False)
    ids = ([0, 4, 5, 6, 7],)
    side.allocated("a", ids, 0)
    (store,) = side.build_step(step_output(new=[("a", ids, 0, 70)])).stores
    assert store.block_ids == [[0, 4, 5, 6]]


def test_fault_c11_chunked_prefill_stores_every_chunk_once_whatever_order_they_end_in(port):
    """Several stores of one request are in flight; none replaces another."""
    side = make(port)
    request = Request("a", list(range(4 * CHUNK + 5)))
    assert ask(side, port, request, 0) == (0, False)
    table = blocks_for(4 * CHUNK + 5)
    side.allocated("a", (table[0][:4],), 0)
    stores = side.build_step(step_output(new=[("a", (table[0][:4],), 0, CHUNK)])).stores
    for chunk in range(1, 4):
        more = (table[0][4 * chunk : 4 * chunk + 4],)
        stores += side.build_step(
            step_output(cached=[("a", more, chunk * CHUNK, CHUNK, False)])
        ).stores
    stores += side.build_step(
        step_output(cached=[("a", (table[0][16:],), 4 * CHUNK, 5, False)])
    ).stores
    assert len(stores) == 4
    assert [ids for store in stores for ids in store.block_ids[0]] == table[0][:16]
    assert len({digest for store in stores for digest in store.digests}) == 4
    side.finished("a")
    for left, job in zip((3, 2, 1, 0), (stores[3], stores[1], stores[0], stores[2]), strict=True):
        assert side.has_running_jobs
        side.report(over(job.job_id))
        assert side.has_running_jobs is (left > 0)


def test_tokens_behind_the_last_whole_prompt_chunk_are_not_stored(port):
    """Fault a12: a block list with a tail that is no whole chunk is nothing special."""
    side = make(port)
    request = Request("a", list(range(2 * CHUNK + 40)))
    assert ask(side, port, request, 0) == (0, False)
    table = blocks_for(3 * CHUNK)
    side.allocated("a", table, 0)
    (store,) = side.build_step(step_output(new=[("a", table, 0, 2 * CHUNK + 40)])).stores
    assert len(store.digests) == 2
    request.all_token_ids += range(500, 600)
    decode = step_output(cached=[("a", None, 2 * CHUNK + 40, 1, False)])
    assert side.build_step(decode).stores == []


def test_mp_098_fault_d07_a_prompt_shorter_than_a_chunk_asks_nobody(port):
    side = make(port)
    assert side.matched_tokens(Request("a", list(range(CHUNK - 1))), 0) == (0, False)
    side.allocated("a", blocks_for(CHUNK - 1), 0)
    assert side.build_step(step_output(new=[("a", blocks_for(63), 0, 63)])).stores == []
    side.finished("a")
    assert port.sent == []


def test_reused_blocks_fence_the_store_that_reads_them(port):
    side = make(port)
    first = Request("a", list(range(CHUNK)))
    ask(side, port, first, 0)
    side.allocated("a", blocks_for(CHUNK), 0)
    (store,) = side.build_step(step_output(new=[("a", blocks_for(CHUNK), 0, CHUNK)])).stores
    side.finished("a")  # its blocks are free while the store still reads them
    second = Request("b", list(range(1000, 1000 + CHUNK)))
    ask(side, port, second, 0)
    side.allocated("b", ([*blocks_for(CHUNK)[0][2:], 7, 8],), 0)
    step = side.build_step(step_output(new=[("b", ([*blocks_for(CHUNK)[0][2:], 7, 8],), 0, 10)]))
    assert step.fence == [store.job_id]
    third = Request("c", list(range(2000, 2000 + CHUNK)))
    ask(side, port, third, 0)
    side.allocated("c", ([1, 2, 3, 4],), 0)
    assert side.build_step(step_output(new=[("c", ([1, 2, 3, 4],), 0, 10)])).fence == []
    growing = step_output(cached=[("c", ([100],), 10, 20, False)])
    assert side.build_step(growing).fence == [store.job_id]
    side.report(over(store.job_id))
    assert side.build_step(step_output(cached=[("c", ([101],), 30, 16, False)])).fence == []


def test_blocks_shared_through_the_engines_own_cache_fence_nothing(port):
    side = make(port)
    first = Request("a", list(range(2 * CHUNK)))
    ask(side, port, first, 0)
    side.allocated("a", blocks_for(2 * CHUNK), 0)
    side.build_step(step_output(new=[("a", blocks_for(2 * CHUNK), 0, 2 * CHUNK)]))
    second = Request("b", list(range(2 * CHUNK + 10)))
    ask(side, port, second, 0, local=2 * CHUNK)
    shared = ([*blocks_for(2 * CHUNK)[0], 500],)
    side.allocated("b", shared, 0)
    assert side.build_step(step_output(new=[("b", shared, 2 * CHUNK, 10)])).fence == []


def test_a_preempted_request_fences_its_stores_waits_for_them_and_looks_again(port):
    side = make(port)
    request = Request("a", list(range(2 * CHUNK)))
    ask(side, port, request, 0)
    side.allocated("a", blocks_for(2 * CHUNK), 0)
    (store,) = side.build_step(step_output(new=[("a", blocks_for(128), 0, CHUNK)])).stores
    assert side.build_step(step_output(preempted=["a"])).fence == [store.job_id]
    request.preempt()
    assert side.matched_tokens(request, 0) == (None, False)
    assert len(port.of(Lookup)) == 1
    side.report(over(store.job_id))
    assert ask(side, port, request, 1) == (CHUNK, True)
    assert len(port.of(Lookup)) == 2


def test_what_follows_a_load_is_stored_only_when_every_worker_loaded_well(port):
    """A step computed on top of a failed load is wrong, on every rank."""
    side = make(port, load_async=False, workers=2)
    request = Request("a", list(range(3 * CHUNK)))
    external, is_async = ask(side, port, request, 1)
    assert (external, is_async) == (CHUNK, False)
    table = blocks_for(3 * CHUNK)
    side.allocated("a", table, external)
    step = side.build_step(step_output(new=[("a", table, CHUNK, CHUNK)]))
    assert step.loads[0].synchronous
    assert step.stores == []
    side.report(over(step.loads[0].job_id))
    halfway = side.build_step(step_output(cached=[("a", None, 2 * CHUNK, CHUNK, False)]))
    assert halfway.stores == []
    side.report(over(step.loads[0].job_id))
    (store,) = side.build_step(step_output(cached=[("a", None, 3 * CHUNK, 1, False)])).stores
    assert len(store.digests) == 2


def test_fault_c01_after_a_failed_load_nothing_is_promised_and_all_is_offered_again(port):
    """The engine recomputes; a promise repeated would fail the same way for ever."""
    side = make(port, workers=2)
    request = Request("a", list(range(3 * CHUNK)))
    external, _ = ask(side, port, request, 2)
    table = blocks_for(3 * CHUNK)
    side.allocated("a", (table[0][:8],), external)
    (load,) = side.build_step(step_output()).loads
    side.report(over(load.job_id, failed=[load.job_id]))
    side.report(over(load.job_id))
    assert side.matched_tokens(request, 0) == (0, False)
    assert side.matched_tokens(request, 0) == (0, False)
    side.allocated("a", table, 0)
    (store,) = side.build_step(step_output(new=[("a", table, 0, 3 * CHUNK)])).stores
    assert len(store.digests) == 3
    assert ended(port) == sessions(port)


def test_an_abort_while_loading_leaves_the_load_to_end_by_itself(port):
    side = make(port)
    request = Request("a", list(range(2 * CHUNK)))
    external, _ = ask(side, port, request, 1)
    side.allocated("a", blocks_for(2 * CHUNK), external)
    side.finished("a")
    (load,) = side.build_step(step_output()).loads
    assert side.has_running_jobs
    side.report(over(load.job_id))
    assert not side.has_running_jobs


def test_a_report_of_a_load_from_before_a_preemption_changes_nothing(port):
    side = make(port, load_async=False)
    request = Request("a", list(range(2 * CHUNK)))
    external, _ = ask(side, port, request, 1)
    side.allocated("a", blocks_for(2 * CHUNK), external)
    (old,) = side.build_step(step_output(new=[("a", blocks_for(128), CHUNK, 10)])).loads
    side.build_step(step_output(preempted=["a"]))
    request.preempt()
    external, _ = ask(side, port, request, 1)
    side.allocated("a", blocks_for(2 * CHUNK), external)
    step = side.build_step(step_output(new=[("a", blocks_for(128), CHUNK, 2 * CHUNK)]))
    ended = len(port.of(EndSession))
    side.report(over(old.job_id, failed=[old.job_id]))
    assert len(port.of(EndSession)) == ended
    assert side.build_step(step_output(cached=[("a", None, 128, 1, False)])).stores == []
    side.report(over(step.loads[0].job_id))
    assert len(side.build_step(step_output(cached=[("a", None, 129, 1, False)])).stores) == 1


def test_without_a_server_nothing_is_asked_or_stored(port):
    side = make(port)
    port.incarnation = None
    request = Request("a", list(range(2 * CHUNK)))
    assert side.matched_tokens(request, 0) == (None, False)
    port.fail(PeerGone("no server"))
    assert side.matched_tokens(request, 0) == (0, False)
    side.allocated("a", blocks_for(2 * CHUNK), 0)
    assert side.build_step(step_output(new=[("a", blocks_for(128), 0, 128)])).stores == []
    assert not side.has_running_jobs


def test_before_the_workers_said_what_they_hold_nothing_is_asked(port):
    side = make(port)
    side.shards = []
    assert side.matched_tokens(Request("a", list(range(300))), 0) == (0, False)


def test_prompt_embeddings_are_left_alone(port):
    side = make(port)
    request = Request("a", list(range(300)), prompt_embeds=object())
    assert side.matched_tokens(request, 0) == (0, False)
    side.allocated("a", blocks_for(300), 0)
    assert side.build_step(step_output(new=[("a", blocks_for(300), 0, 300)])).stores == []
    side.finished("a")
    assert port.sent == []


def test_mp_085_salts_and_adapters_never_share(port):
    side = make(port)
    tokens = list(range(CHUNK))
    adapter = type("Adapter", (), {"lora_name": "x", "lora_path": "/x"})()
    for name, extra in (("a", {}), ("b", {"cache_salt": "s"}), ("c", {"lora_request": adapter})):
        side.matched_tokens(Request(name, tokens, **extra), 0)
    assert len({lookup.digests for lookup in port.of(Lookup)}) == 3


ODD_SALTS = ["a/b", "a@b", "a\\b", "a\0b", "a\nb", "s" * 129, "\ud800", "/", "@" * 10_000]


@pytest.mark.parametrize("salt", ODD_SALTS)
def test_mp_d31_a_salt_with_any_characters_is_a_tenant_and_raises_nowhere(port, salt):
    """Salts are users' text. One that cannot be a tenant's name is stored for a hash of it."""
    side = make(port)
    request = Request("a", list(range(CHUNK)), cache_salt=salt)
    assert ask(side, port, request, 0) == (0, False)
    side.allocated("a", blocks_for(CHUNK), 0)
    (store,) = side.build_step(step_output(new=[("a", blocks_for(CHUNK), 0, CHUNK)])).stores
    assert is_tenant(store.tenant)
    assert len(bytes.fromhex(store.tenant)) == 32
    (lookup,) = port.of(Lookup)
    assert b"".join(store.digests) == lookup.digests
    port.sent.clear()
    # Whoever knows the tenant's name, from metrics say, is not the tenant.
    side.matched_tokens(Request("b", list(range(CHUNK)), cache_salt=store.tenant), 0)
    assert port.of(Lookup)[0].digests != lookup.digests


@pytest.mark.parametrize("salt", [None, "", "plain", "with spaces: 1.2-3_4", "ü" * 128])
def test_other_salts_are_tenants_as_they_are(port, salt):
    side = make(port)
    ask(side, port, Request("a", list(range(CHUNK)), cache_salt=salt), 0)
    side.allocated("a", blocks_for(CHUNK), 0)
    (store,) = side.build_step(step_output(new=[("a", blocks_for(CHUNK), 0, CHUNK)])).stores
    assert store.tenant == (salt or "")


def test_mp_d31_odd_salts_share_with_nobody():
    salts = [*ODD_SALTS, "", "a", *map(tenant_of, ODD_SALTS), *map(salt_for_digests, ODD_SALTS)]
    assert len({salt_for_digests(salt) for salt in salts}) == len({*salts})


def test_mp_094_mp_d32_a_request_id_that_comes_again_names_its_own_chunks(port):
    """Nothing is left of the tokens of another request of that name."""
    side = make(port)
    for tokens in (list(range(3 * CHUNK)), [9, *range(1, 3 * CHUNK)]):
        side.matched_tokens(Request("same", tokens), 0)
        expected = ChunkChain(
            root_digest(model="m", chunk_tokens=CHUNK, dtype="bfloat16"), CHUNK
        ).extend(tokens)
        assert port.of(Lookup)[-1].digests == b"".join(expected)
        side.finished("same")
    first, second = (lookup.digests for lookup in port.of(Lookup))
    assert not {*split_digests(first)} & {*split_digests(second)}
    assert len({*sessions(port)}) == 2


def test_unknown_requests_are_tolerated(port):
    side = make(port)
    side.finished("never seen")
    side.allocated("never seen", ([1],), 0)
    side.report(over(99, failed=[98]))
    output = step_output(
        new=[("x", ([1],), 0, 5)], cached=[("y", None, 0, 1, False)], preempted=["z"]
    )
    step = side.build_step(output)
    assert (step.loads, step.stores, step.fence) == ([], [], [])


def test_blocks_given_to_a_request_we_do_not_follow_are_fenced_too(port):
    side = make(port)
    first = Request("a", list(range(CHUNK)))
    ask(side, port, first, 0)
    side.allocated("a", blocks_for(CHUNK), 0)
    (store,) = side.build_step(step_output(new=[("a", blocks_for(CHUNK), 0, CHUNK)])).stores
    side.finished("a")
    stranger = Request("b", list(range(CHUNK)), prompt_embeds=object())
    assert side.matched_tokens(stranger, 0) == (0, False)
    side.allocated("b", ([101],), 0)
    step = side.build_step(step_output(new=[("b", ([101],), 0, 10)]))
    assert step.fence == [store.job_id]
    step = side.build_step(step_output(cached=[("b", ([103],), 10, 10, False)]))
    assert step.fence == [store.job_id]


def test_what_builds_on_blocks_another_request_loads_in_this_step_is_not_stored(port):
    """The engine shares them at once; if that load fails, both requests are recomputed."""
    side = make(port, load_async=False)
    loading = Request("a", list(range(2 * CHUNK)))
    external, _ = ask(side, port, loading, 1)
    side.allocated("a", blocks_for(2 * CHUNK), external)
    sharing = Request("b", [*range(CHUNK), *range(900, 900 + CHUNK)])
    ask(side, port, sharing, 1, local=CHUNK)
    table = ([*blocks_for(CHUNK)[0], 1, 2, 3, 4],)
    side.allocated("b", table, 0)
    step = side.build_step(
        step_output(new=[("a", blocks_for(128), CHUNK, CHUNK), ("b", table, CHUNK, CHUNK)])
    )
    assert step.stores == []
    (load,) = step.loads
    side.report(over(load.job_id))
    step = side.build_step(
        step_output(cached=[("a", None, 128, 1, False), ("b", None, 128, 1, False)])
    )
    assert sorted(store.block_ids[0][0] for store in step.stores) == [1, 104]


def test_one_request_that_breaks_keeps_no_fence_or_load_of_others_from_the_step(port):
    side = make(port)
    first = Request("a", list(range(CHUNK)))
    ask(side, port, first, 0)
    side.allocated("a", blocks_for(CHUNK), 0)
    (store,) = side.build_step(step_output(new=[("a", blocks_for(CHUNK), 0, CHUNK)])).stores
    loading = Request("b", list(range(2 * CHUNK)))
    external, _ = ask(side, port, loading, 1)
    side.allocated("b", ([100, *range(50, 57)],), external)
    broken = Request("c", [*range(CHUNK), *range(CHUNK - 1), -1])
    assert side.matched_tokens(Request("d", list(range(10))), 0) == (0, False)
    side.allocated("d", ([60],), 0)
    side._trackers["c"] = side._trackers.pop("d")
    side._trackers["c"].tokens = broken.all_token_ids
    side._trackers["c"].prompt_chunks = 2
    table = (list(range(60, 68)),)
    step = side.build_step(step_output(new=[("c", table, 0, 2 * CHUNK)]))
    assert step.fence == [store.job_id]
    assert [load.request_id for load in step.loads] == ["b"]
    assert step.stores == []


def test_a_load_promised_to_a_request_we_lost_is_reported_as_failed(port):
    side = make(port)
    side.allocated("lost", ([5, 6],), 20)
    (load,) = side.build_step(step_output()).loads
    assert (load.request_id, load.digests, load.block_ids) == ("lost", [], [[5, 6]])
    side.report(over(load.job_id, failed=[load.job_id]))
    assert not side.has_running_jobs


def test_a_refused_load_never_blames_blocks_that_were_shared(port):
    side = make(port)
    request = Request("a", list(range(2 * CHUNK)))
    ask(side, port, request, 2, local=BLOCK)
    side.refuse_load("a", blocks_for(2 * CHUNK))
    (load,) = side.build_step(step_output()).loads
    assert load.skip_tokens == BLOCK


def test_a_model_with_one_windowed_group_loads_between_steps_only(port):
    """Its failures are those of a whole request: what lies before the window was left out."""
    side = make(port, groups=(GroupShape(BLOCK, window=64),), load_async=False)
    assert ask(side, port, Request("a", list(range(300))), 2) == (2 * CHUNK, True)


def test_a_reset_clears_this_model_and_forgets_what_was_looked_up(port):
    side = make(port)
    waiting = Request("a", list(range(2 * CHUNK)))
    assert ask(side, port, waiting, 2)[0] > 0
    assert side.reset() is True
    (clear,) = port.of(Clear)
    assert clear.shards == side.shards
    assert ask(side, port, waiting, 0) == (0, False)
    side.allocated("a", blocks_for(2 * CHUNK), 0)
    (store,) = side.build_step(step_output(new=[("a", blocks_for(128), 0, 128)])).stores
    assert side.reset() is False  # what that store publishes would survive
    side.report(over(store.job_id))
    assert side.reset() is True
    assert len(port.of(Clear)) == 2


def test_a_step_says_whether_a_request_of_it_decodes(port):
    """Other requests may be at their prompts in the same step."""
    side = make(port)
    prompt = ("a", ([1, 2, 3],), 0, 48)
    assert not side.build_step(step_output()).decoding
    assert not side.build_step(step_output(new=[prompt])).decoding
    assert side.build_step(step_output(new=[prompt], cached=[("b", (), 70, 1, False)])).decoding
    assert side.build_step(step_output(cached=[("b", (), 71, 5, False)])).decoding, "speculation"
