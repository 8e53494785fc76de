"""The endpoints, over real sockets at a real server."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

import pytest
from adminkit import CHUNK_BYTES, CHUNK_TOKENS, SHARD, TOKEN, WAIT, AdminRig, digests
from tierkit import MemoryTier

from lmcache_kernels import __version__
from lmcache_kernels.adapters.admin import asking, looks
from lmcache_kernels.adapters.admin.server import AdminServer
from lmcache_kernels.errors import ConfigError, TransferTimeout
from lmcache_kernels.transfer.memory.slot_header import pack_header
from lmcache_kernels.transfer.messages import Cleared, Lookup, PrepareStore
from lmcache_kernels.transfer.serving.later import Later


def test_health_and_version(rig):
    assert rig.get("/health") == {"status": "ok"}
    version = rig.get("/version")
    assert (version["version"], version["incarnation"]) == (__version__, rig.service.incarnation)


def test_ready_follows_what_the_server_does(rig):
    assert rig.get("/ready") == {"status": "serving"}
    for phase in ("starting", "draining"):
        rig.phase = phase
        status, _, body = rig.http("GET", "/ready")
        assert (status, body) == (503, b'{"status":"%s"}' % phase.encode())
        assert rig.get("/health") == {"status": "ok"}, "it lives all the same"


def test_fault_e08_a_busy_server_is_alive_and_not_ready(rig, monkeypatch):
    """While its thread stands still, health answers at once and everything else within its bound."""
    monkeypatch.setattr(asking, "LOOK_TIMEOUT", 0.2)
    monkeypatch.setattr(asking, "CHANGE_TIMEOUT", 0.2)
    leave = rig.block()
    try:
        assert rig.http("GET", "/health", timeout=1.0)[0] == 200
        assert rig.http("GET", "/version", timeout=1.0)[0] == 200
        for path in ("/ready", "/status", "/metrics", "/cache/chunks"):
            assert rig.http("GET", path)[0] == 503, path
        status, answer = rig.change("POST", "/cache/clear")
        assert status == 503
        assert "nothing was done" in answer["error"]
        assert rig.http("GET", "/health", timeout=1.0)[0] == 200
    finally:
        leave.set()
    rig.loop.call(lambda: None).result(WAIT)
    assert rig.get("/ready") == {"status": "serving"}
    assert rig.loop.requests.served() == [], "the clear that nobody waits for any more was not made"


def test_a_server_that_has_stopped_says_so(rig):
    rig.loop.stop()
    rig.thread.join(WAIT)
    rig.loop.close()
    status, _, body = rig.http("GET", "/status")
    assert (status, body) == (503, b'{"error":"the server has stopped"}')
    assert rig.http("GET", "/ready")[0] == 503
    assert rig.http("GET", "/health")[0] == 200


def test_status_tells_all_of_it(rig):
    rig.register()
    rig.store(0, 4)
    rig.lookup(0, 8)
    rig.load(0, 4, damaged=[2])
    rig.ask(Lookup(request="kept", shards=[SHARD], digests=digests(0, 1)))
    rig.ask(PrepareStore(instance=1, digests=digests(20, 22)))
    status = rig.get("/status")
    assert (status["phase"], status["chunk_tokens"]) == ("serving", CHUNK_TOKENS)
    assert status["lookups"] == {
        "answered": 2,
        "tokens": 9 * CHUNK_TOKENS,
        "hit_tokens": 5 * CHUNK_TOKENS,
        "hit_ratio": 5 / 9,
    }
    (l1,) = status["tiers"]
    assert (l1["tier"], l1["chunks"], l1["used_bytes"]) == ("l1", 3, 5 * 1536)
    assert status["stores"]["bytes"] == 4 * CHUNK_BYTES
    assert (status["loads"]["ok"], status["loads"]["failed"]["damaged"]) == (0, 1)
    assert status["under_way"] == {
        "leases": 1,
        "stores": 1,
        "loads": 0,
        "requests_waiting": 0,
        "tier_lookups": 0,
        "tier_stores": 0,
    }
    (worker,) = status["workers"]
    assert (worker["instance"], worker["shard"], worker["copies"]) == (1, SHARD.hex(), "worker")
    assert 0 <= worker["last_seen_seconds"] < 60
    assert status["requests"]["lookup"]["outcomes"] == {"ok": 2}
    slowest = status["slowest"]
    assert {slow["operation"] for slow in slowest} >= {"lookup", "prepare_store", "register"}
    assert [slow["seconds"] for slow in slowest] == sorted(
        (slow["seconds"] for slow in slowest), reverse=True
    )
    assert all(0 <= slow["seconds_ago"] < 60 for slow in slowest)


def test_nothing_asked_is_no_ratio(rig):
    status = rig.get("/status")
    assert status["lookups"]["hit_ratio"] is None
    assert status["tiers"][0]["hit_ratio"] is None


def test_config_is_what_the_server_was_given():
    with AdminRig(config=lambda: {"port": 5555, "admin_token_file": "***"}) as rig:
        assert rig.get("/config") == {"port": 5555, "admin_token_file": "***"}


# --- chunks ---------------------------------------------------------------------------------------


def numbers(answer):
    return [int(chunk["digest"], 16) for chunk in answer["chunks"]]


def test_chunks_page_by_page(rig):
    assert rig.get("/cache/chunks") == {"chunks": [], "next": None}
    rig.register()
    rig.store(0, 5)
    first = rig.get("/cache/chunks?limit=3")
    assert (numbers(first), first["next"]) == ([0, 1, 2], 3)
    second = rig.get(f"/cache/chunks?limit=3&after={first['next']}")
    assert (numbers(second), second["next"]) == ([3, 4], None)
    assert first["chunks"][0] == {
        "shard": SHARD.hex(),
        "digest": bytes(32).hex(),
        "bytes": 1536,
        "state": "idle",
        "holders": 0,
        "hits": 0,
    }


def test_chunks_of_one_shard_and_how_much_of_the_table_one_answer_looks_at(rig, monkeypatch):
    monkeypatch.setattr(looks, "PAGE", 4)
    monkeypatch.setattr(looks, "MOST_LOOKS", 3)
    rig.register()
    rig.store(0, 14)
    rig.register(1, b"t" * 32)
    rig.store(50, 52)
    shard = (b"t" * 32).hex()
    answer = rig.get(f"/cache/chunks?limit=4&shard={shard}")
    assert (answer["chunks"], answer["next"]) == ([], 12)
    answer = rig.get(f"/cache/chunks?limit=4&shard={shard}&after=12")
    assert (numbers(answer), answer["next"]) == ([50, 51], None)


@pytest.mark.parametrize(
    "query",
    [
        *("limit=0", "limit=1001", "limit=-1", "limit=x", "limit=", "limit=1e3", "limit=٣"),
        *("after=-1", "after=99999999999999999999999", "shard=ab", "shard=" + "zz" * 32),
        "shard=" + "ab" * 33,
    ],
)
def test_queries_that_make_no_sense_are_400(rig, query):
    status, _, body = rig.http("GET", f"/cache/chunks?{query}".encode("ascii", "replace").decode())
    assert status == 400
    assert query.partition("=")[0].encode() in body


# --- changes --------------------------------------------------------------------------------------


def test_clear_lets_nothing_be_found_again(rig):
    rig.register()
    rig.store(0, 4)
    rig.register(1, b"t" * 32)
    rig.store(0, 2)
    assert rig.change("POST", "/cache/clear", {"shards": [SHARD.hex()]}) == (200, {"cleared": 4})
    assert rig.lookup(0, 4) == 0
    assert rig.change("POST", "/cache/clear") == (200, {"cleared": 2})
    assert rig.get("/status")["requests"]["clear"]["outcomes"] == {"ok": 2}


def test_a_change_without_the_token_is_401_and_changes_nothing(rig):
    rig.register()
    rig.store(0, 4)
    for token in (None, "", "wrong", TOKEN + "x"):
        status, answer = rig.change("POST", "/cache/clear", token=token)
        assert (status, "Authorization" in answer["error"]) == (401, True)
    assert rig.lookup(0, 4) == 4


def test_without_a_token_changes_are_off_and_reads_are_not():
    with AdminRig(token=None) as rig:
        status, answer = rig.change("POST", "/cache/clear")
        assert (status, "--admin-token-file" in answer["error"]) == (403, True)
        assert rig.get("/status")["phase"] == "serving"


def test_without_a_token_others_must_not_reach_it(rig):
    with pytest.raises(ConfigError, match="token"):
        AdminServer("0.0.0.0", 0, None, loop=rig.loop, service=rig.service)


def test_elsewhere_everything_but_health_needs_the_token():
    with AdminRig(host="0.0.0.0") as rig:
        assert rig.http("GET", "/status")[0] == 401
        assert rig.http("GET", "/metrics")[0] == 401
        assert rig.http("GET", "/health")[0] == 200
        assert rig.change("GET", "/status")[0] == 200
        headers = {"host": "cache.example.org", "authorization": f"Bearer {TOKEN}"}
        assert rig.http("GET", "/status", headers=headers)[0] == 200


@pytest.mark.parametrize(
    "body",
    [
        *({"shards": "ab" * 32}, {"shards": [1]}, {"shards": ["ab"]}, {"shards": ["g" * 64]}, []),
        *({"shard": []}, {"shards": None}, "text", 1, None, {"shards": [], "more": 1}),
    ],
)
def test_bodies_of_another_form_are_400_and_change_nothing(rig, body):
    rig.register()
    rig.store(0, 2)
    if body is None:
        status, _, _ = rig.http(
            "POST",
            "/cache/clear",
            b'{"shards": [',
            {"authorization": f"Bearer {TOKEN}", "content-type": "application/json"},
        )
    else:
        status, _ = rig.change("POST", "/cache/clear", body)
    assert status == 400
    assert rig.lookup(0, 2) == 2


@pytest.mark.parametrize("kind", ["text/plain", "", "application/x-www-form-urlencoded"])
def test_bodies_that_are_no_json_are_415(rig, kind):
    headers = {"authorization": f"Bearer {TOKEN}", "content-type": kind}
    assert rig.http("POST", "/cache/clear", b"{}", headers)[0] == 415


def test_an_error_of_the_cache_is_its_own_status(rig):
    rig.service._clear = None  # a bug in the server
    rig.service._methods = {}
    status, answer = rig.change("POST", "/cache/clear")
    assert (status, "not served" in answer["error"]) == (404, True)


def test_a_change_that_comes_later_is_waited_for(rig):
    later = Later()
    rig.service.handle = lambda *_: later
    answers = []
    asking = threading.Thread(target=lambda: answers.append(rig.change("POST", "/cache/clear")))
    asking.start()
    while not rig.loop.call(lambda: rig.loop.waiting).result(WAIT):
        pass
    rig.loop.call(lambda: rig.service._inbox.reply(later, Cleared(chunks=3))).result(WAIT)
    asking.join(WAIT)
    assert answers == [(200, {"cleared": 3})]


@dataclass
class Reloaded:
    changed: dict


def test_reload_calls_what_it_was_given_and_tells_what_was_wrong():
    outcomes = [
        {"changed": ["log_level"]},
        ConfigError("eviction_ratio: expected at most 1"),
        TransferTimeout("the server did nothing for 30 s"),
        OSError(),
        Reloaded({"log-level": ("info", "debug")}),
    ]

    def reload():
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    with AdminRig(reload=reload) as rig:
        assert rig.change("POST", "/reload") == (200, {"changed": ["log_level"]})
        assert rig.change("POST", "/reload") == (
            400,
            {"error": "eviction_ratio: expected at most 1"},
        )
        assert rig.change("POST", "/reload") == (503, {"error": "the server did nothing for 30 s"})
        status, answer = rig.change("POST", "/reload")
        assert (status, "OSError" in answer["error"]) == (500, True)
        assert rig.change("POST", "/reload", token=None)[0] == 401
        changed = {"changed": {"log-level": ["info", "debug"]}}
        assert rig.change("POST", "/reload") == (200, changed)


def test_a_reload_that_takes_long_is_answered_all_the_same(monkeypatch):
    monkeypatch.setattr(asking, "CHANGE_TIMEOUT", 0.1)
    go_on = threading.Event()
    with AdminRig(reload=lambda: go_on.wait(WAIT)) as rig:
        status, answer = rig.change("POST", "/reload")
        go_on.set()
        assert (status, "it goes on" in answer["error"]) == (503, True)


def test_reload_is_not_there_where_nothing_can_be_read_again(rig):
    assert rig.change("POST", "/reload")[0] == 404


# --- pins and quotas ------------------------------------------------------------------------------


def pin_body(first, last, **changes):
    names = [number.to_bytes(32, "big").hex() for number in range(first, last)]
    return {"pin": "p", "shards": [SHARD.hex()], "digests": names, "seconds": 60.0} | changes


def test_pinned_chunks_stay_and_pins_are_listed():
    with AdminRig(chunks=8) as rig:
        rig.register()
        rig.store(0, 4)
        assert rig.change("POST", "/cache/pins", pin_body(0, 6)) == (200, {"pinned": 4})
        rig.store(10, 18)
        assert rig.lookup(0, 4) == 4
        (pin,) = rig.get("/cache/pins")["pins"]
        assert (pin["pin"], pin["chunks"]) == ("p", 4)
        assert 0 < pin["seconds_left"] <= 60
        assert rig.get("/status")["pins"] == {"count": 1, "bytes": 4 * 1536}
        assert rig.change("DELETE", "/cache/pins/p") == (200, {"unpinned": "p"})
        assert rig.get("/cache/pins") == {"pins": []}
        rig.store(20, 28)
        assert rig.lookup(0, 4) == 0
        assert rig.change("DELETE", "/cache/pins/never/there")[0] == 200


def prefetched(rig, wanted):
    """How the job ends, and with how many chunks."""
    status, job = rig.change("POST", "/cache/prefetches", wanted)
    assert status == 202
    give_up_at = time.monotonic() + 20
    while job["state"] == "running":
        assert time.monotonic() < give_up_at
        job = rig.get(f"/cache/prefetches/{job['prefetch']}")
    return job["state"], job["found"]


def test_a_prefetch_brings_up_what_a_tier_has():
    below = MemoryTier()
    for number in range(4):
        key = SHARD, number.to_bytes(32, "big")
        below.chunks[key] = pack_header(*key, CHUNK_BYTES, [1]) + bytes(CHUNK_BYTES)
    wanted = pin_body(0, 6)
    del wanted["pin"], wanted["seconds"]
    with AdminRig(tiers=[below]) as rig:
        assert prefetched(rig, wanted) == ("done", 0)
        rig.register()
        assert prefetched(rig, wanted) == ("done", 4)
        status = rig.get("/status")
        assert (status["tiers"][0]["chunks"], status["under_way"]["leases"]) == (4, 0)
        assert rig.change("POST", "/cache/prefetches", {"shards": [], "digests": []})[0] == 400
        assert rig.change("POST", "/cache/prefetches", wanted, token=None)[0] == 401
        assert rig.http("GET", "/cache/prefetches/unknown")[0] == 404


def test_a_prefetch_that_takes_long_can_be_looked_at_and_cancelled():
    below = MemoryTier()
    below.gate.clear()
    wanted = pin_body(0, 6)
    del wanted["pin"], wanted["seconds"]
    with AdminRig(tiers=[below]) as rig:
        rig.register()
        status, job = rig.change("POST", "/cache/prefetches", wanted)
        assert (status, job["state"], job["chunks"]) == (202, "running", 6)
        path = f"/cache/prefetches/{job['prefetch']}"
        assert rig.get(path)["state"] == "running"
        assert rig.get("/status")["under_way"]["tier_lookups"] == 1
        assert rig.change("DELETE", path, token=None)[0] == 401
        assert rig.change("DELETE", path)[1]["state"] == "cancelled"
        assert rig.get("/status")["under_way"]["tier_lookups"] == 0
        assert rig.change("DELETE", path)[1]["state"] == "cancelled"
        for _ in range(15):
            assert rig.change("POST", "/cache/prefetches", wanted)[0] == 202
        assert rig.change("POST", "/cache/prefetches", wanted)[0] == 202
        assert rig.change("POST", "/cache/prefetches", wanted)[0] == 503
        below.gate.set()


@pytest.mark.parametrize(
    "changes",
    [
        *({"seconds": 0}, {"seconds": -1}, {"seconds": 1e9}, {"seconds": "1"}, {"pin": "x" * 600}),
        *({"shards": []}, {"shards": ["ab"]}, {"digests": ["zz" * 32]}, {"digests": "ab" * 32}),
        *({"digests": [None]}, {"pin": None}, {"more": 1}),
    ],
)
def test_pins_that_cannot_be_are_400(rig, changes):
    rig.register()
    rig.store(0, 2)
    assert rig.change("POST", "/cache/pins", pin_body(0, 2, **changes))[0] == 400
    assert rig.get("/cache/pins") == {"pins": []}


def test_quotas_are_set_told_and_taken_away(rig):
    assert rig.get("/quota") == {"default_bytes": None, "tenants": {}}
    use = {"quota_bytes": 4096, "used_bytes": 0}
    assert rig.change("PUT", "/quota/team-a", {"bytes": 4096}) == (
        200,
        {"tenant": "team-a"} | use,
    )
    assert rig.change("PUT", "/quota", {"bytes": 100}) == (200, {"default_bytes": 100})
    others = {"quota_bytes": 100, "used_bytes": 0}  # whose names may be secret, together
    assert rig.get("/quota") == {"default_bytes": 100, "tenants": {"team-a": use, "*": others}}
    assert rig.get("/quota/team-a") == {"tenant": "team-a"} | use
    assert rig.http("GET", "/quota/team-b")[0] == 404
    now = rig.scrape()
    assert now[("lmcache_kernels_tenant_quota_bytes", ("tenant", "team-a"))] == 4096
    assert rig.change("DELETE", "/quota/team-a") == (200, {"tenant": "team-a"})
    assert rig.change("DELETE", "/quota") == (200, {"default_bytes": None})
    assert rig.get("/quota") == {"default_bytes": None, "tenants": {}}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        *(("/quota/a", {"bytes": -1}), ("/quota/a", {"bytes": 1.5}), ("/quota/a", {"bytes": "1"})),
        *(("/quota/a", {}), ("/quota/a", None), ("/quota", {"bytes": True}), ("/quota/a@b", {"bytes": 1})),
        *(("/quota/a/b", {"bytes": 1}), ("/quota/" + "x" * 129, {"bytes": 1}), ("/quota/a%00", {"bytes": 1})),
    ],
)  # fmt: skip
def test_quotas_that_cannot_be_are_400(rig, path, body):
    assert rig.change("PUT", path, body)[0] == 400
    assert rig.get("/quota") == {"default_bytes": None, "tenants": {}}


def test_pins_and_quotas_need_the_token(rig):
    for method, path in (
        *(("POST", "/cache/pins"), ("DELETE", "/cache/pins/p"), ("PUT", "/quota/a")),
        *(("DELETE", "/quota/a"), ("PUT", "/quota"), ("DELETE", "/quota")),
    ):
        assert rig.change(method, path, token=None)[0] == 401


# --- what is not there ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        *(("GET", "/", 404), ("GET", "/nothing", 404), ("GET", "/health/", 404)),
        *(("GET", "/cache/clear", 405), ("POST", "/status", 405), ("DELETE", "/health", 405)),
        *(("GET", "/../etc/passwd", 404), ("GET", "/health/../../etc/passwd", 404)),
        *(("GET", "//health", 404), ("GET", "/%2e%2e/health", 404), ("GET", "/health%00", 404)),
        *(("GET", "/cache/chunks/../clear", 404), ("POST", "/cache/clear/", 404)),
        *(("OPTIONS", "/status", 405), ("TRACE", "/status", 405), ("BREW", "/status", 405)),
    ],
)
def test_other_paths_and_methods_are_refused_in_json(rig, method, path, status):
    answered, headers, body = rig.http(method, path, headers={"authorization": f"Bearer {TOKEN}"})
    assert answered == status
    assert headers["content-type"] == "application/json"
    assert body.startswith(b'{"error":')


def test_a_name_that_was_made_to_point_here_reads_nothing(rig):
    """DNS rebinding: a page's own name, now an address of this machine."""
    for path in ("/status", "/metrics", "/health", "/cache/chunks", "/nothing"):
        assert rig.http("GET", path, headers={"host": "evil.example.org"})[0] == 400
