"""What is scraped is what has happened."""

from __future__ import annotations

import pytest
from adminkit import CHUNK_BYTES, CHUNK_TOKENS, SHARD, AdminRig
from tierkit import MemoryTier, TieredCache

from lmcache_kernels.adapters.admin.metrics import METRICS
from lmcache_kernels.transfer.messages import CommitRetrieve, Lookup

NAME = "lmcache_kernels_"


def value(scrape, name, **labels):
    return scrape[(NAME + name, *sorted(labels.items()))]


def by(scrape, name, label):
    """The values above 0, by a label."""
    return {
        dict(labels)[label]: count
        for (sample, *labels), count in scrape.items()
        if sample == NAME + name and count
    }


def test_fault_j01_metrics_say_what_has_happened_exactly(rig):
    """Lookups that find nothing, half and all, two stores and one that fails, a load that fails."""
    rig.register()
    rig.store(0, 4)
    rig.store(4, 6)
    rig.store(10, 13, commit=False)
    assert rig.lookup(20, 24) == 0
    assert rig.lookup(4, 8) == 2
    assert rig.lookup(0, 4) == 4
    rig.load(0, 4)
    rig.load(4, 6, damaged=[0])
    now = rig.scrape()
    assert value(now, "lookups_total", result="miss") == 1
    assert value(now, "lookups_total", result="partial") == 1
    assert value(now, "lookups_total", result="full") == 1
    assert value(now, "lookups_total", result="empty") == 0
    asked = value(now, "lookup_tokens_total")
    hit = value(now, "lookup_hit_tokens_total", tier="l1")
    assert (asked, hit, hit / asked) == (12 * CHUNK_TOKENS, 6 * CHUNK_TOKENS, 0.5)
    assert value(now, "stores_total") == 2
    assert by(now, "store_failures_total", "reason") == {"aborted": 1}
    assert value(now, "stored_chunks_total") == 6
    assert value(now, "stored_bytes_total") == 6 * CHUNK_BYTES
    assert value(now, "loads_total") == 1
    assert by(now, "load_failures_total", "reason") == {"damaged": 1}
    assert value(now, "loaded_chunks_total") == 4
    assert value(now, "loaded_bytes_total") == 4 * CHUNK_BYTES
    assert by(now, "lost_chunks_total", "reason") == {"discarded": 3, "damaged": 1}
    assert by(now, "chunks", "state") == {"idle": 5}
    assert value(now, "tier_used_bytes", tier="l1") == 5 * 1536
    assert value(now, "tier_capacity_bytes", tier="l1") == 64 * 1536
    assert value(now, "requests_total", operation="lookup", outcome="ok") == 3
    assert value(now, "requests_total", operation="commit_store", outcome="ok") == 2
    assert value(now, "requests_total", operation="abort_store", outcome="ok") == 1


def test_what_is_under_way_and_what_went_wrong(rig):
    rig.register()
    rig.register(2, b"t" * 32)
    rig.store(0, 4)
    rig.ask(Lookup(request="held", shards=[SHARD], digests=bytes(0)))
    rig.ask(Lookup(request="kept", shards=[SHARD], digests=(3).to_bytes(32, "big")))
    rig.ask(Lookup(request="bad", shards=[], digests=b""))
    rig.ask(CommitRetrieve(instance=1, ticket=77))
    now = rig.scrape()
    assert value(now, "leases") == 1
    assert by(now, "chunks", "state") == {"idle": 3, "held": 1}
    assert by(now, "workers", "copies") == {"worker": 2}
    assert value(now, "lookups_total", result="empty") == 1
    assert value(now, "requests_total", operation="lookup", outcome="bad_request") == 1
    assert value(now, "requests_total", operation="commit_retrieve", outcome="unknown_ticket") == 1
    assert value(now, "malformed_messages_total") == 0


def test_durations_are_a_histogram_of_what_was_asked(rig):
    rig.register()
    for _ in range(3):
        rig.lookup(0, 2)
    now = rig.scrape()
    buckets = [
        count
        for (name, *labels), count in now.items()
        if name == NAME + "request_duration_seconds_bucket" and ("operation", "lookup") in labels
    ]
    assert buckets == sorted(buckets)
    assert buckets[-1] == 3
    assert value(now, "request_duration_seconds_count", operation="lookup") == 3
    assert 0 < value(now, "request_duration_seconds_sum", operation="lookup") < 60


def test_the_arena_when_chunks_make_room_for_others():
    with AdminRig(chunks=4) as rig:
        rig.register()
        rig.store(0, 4)
        rig.store(4, 7)
        now = rig.scrape()
        assert value(now, "evicted_chunks_total") == 3
        assert value(now, "evicted_bytes_total") == 3 * CHUNK_BYTES
        rig.store(7, 16)
        assert by(rig.scrape(), "store_failures_total", "reason") == {"no_room": 1}


def test_each_tier_has_what_was_found_in_it():
    with TieredCache(MemoryTier()) as cache:
        cache.store(0, 5)
        cache.settle()
        cache.drop_all()
        assert cache.lookup(0, 6) == 5
        with AdminRig(service=cache.service) as rig:
            now = rig.scrape()
    assert by(now, "lookup_hit_tokens_total", "tier") == {"memory": 5 * 256}
    assert value(now, "lookup_tokens_total") == 6 * 256
    assert value(now, "lookups_total", result="partial") == 1
    assert value(now, "tier_stored_bytes_total", tier="memory") == 5 * 2048
    assert value(now, "tier_loaded_bytes_total", tier="memory") == 5 * 2048
    assert value(now, "tier_used_bytes", tier="memory") == 5 * 2048
    assert value(now, "tier_away", tier="memory") == 0
    assert value(now, "stored_chunks_total") == 5, "what came up again was not stored once more"


def test_every_metric_has_help_and_a_good_name():
    names = [told.name for told in METRICS]
    assert len(set(names)) == len(names)
    for told in METRICS:
        assert told.help.endswith("."), told.name
        assert told.name == told.name.lower()


def test_scrapes_come_as_the_scraper_can_read_them(rig):
    openmetrics = "application/openmetrics-text; version=1.0.0"
    status, headers, body = rig.http("GET", "/metrics", headers={"accept": openmetrics})
    assert status == 200
    assert headers["content-type"].startswith("application/openmetrics-text")
    assert body.endswith(b"# EOF\n")
    now = rig.scrape()
    assert now[("process_open_fds",)] > 0
    assert value(now, "uptime_seconds") > 0


@pytest.mark.parametrize("accept", ["", "*/*", "nonsense", "application/openmetrics-text"])
def test_any_accept_header_gets_an_answer(rig, accept):
    assert rig.http("GET", "/metrics", headers={"accept": accept})[0] == 200
