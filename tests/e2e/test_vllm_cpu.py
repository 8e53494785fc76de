"""A real vLLM on the CPU: what it stores, a fresh engine finds, and the answers are the same.

Answers are compared with those of an engine without a connector, token by token, and one control
loads wrong bytes on purpose to show that the comparison would notice.
"""

from __future__ import annotations

import pytest
from arena_tools import damage_headers, scramble_payloads
from e2ekit import CHUNK, Engine, prompt

from lmcache_kernels.adapters.server.spawn import spawn_server

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

SHARED = prompt(3 * CHUNK, seed=5)
PROMPTS = {
    "shorter than a chunk": prompt(CHUNK - 1, seed=1),
    "two chunks exactly": prompt(2 * CHUNK, seed=2),
    "two chunks and a token": prompt(2 * CHUNK + 1, seed=3),
    "long": prompt(300, seed=4),
    "shared prefix, one": SHARED + prompt(20, seed=6),
    "shared prefix, other": SHARED + prompt(40, seed=7),
}
LOADED = {
    "shorter than a chunk": 0,
    "two chunks exactly": 2 * CHUNK - 1,  # one token is left to compute
    "two chunks and a token": 2 * CHUNK,
    "long": 300 // CHUNK * CHUNK,
    "shared prefix, one": 3 * CHUNK,
    "shared prefix, other": 3 * CHUNK,
}


def tokens(answers):
    return [answer["tokens"] for answer in answers]


def cached(answers):
    return [answer["cached"] for answer in answers]


def assert_whole(engine):
    """No request is left and every block but the null block is free."""
    pool = engine.pool()
    assert pool["left"] == 0
    assert pool["free"] == pool["total"] - 1


@pytest.fixture(scope="module")
def expected(models, vllm_python, tmp_path_factory):
    """Answers of an engine without a connector."""
    log = tmp_path_factory.mktemp("baseline") / "engine.log"
    settings = {"llm": {"model": str(models / "llama")}, "connector": None}
    engine = Engine(vllm_python, log, settings, {})
    try:
        found = {}
        for name, ids in PROMPTS.items():
            engine.reset()
            found[name] = engine.generate([ids])[0]["tokens"]
        return found
    finally:
        engine.close()


@pytest.fixture
def server():
    with spawn_server(size_gb=0.2, chunk_size=CHUNK) as running:
        yield running


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"load_async": True}, id="async"),
        pytest.param({"load_async": False}, id="sync"),
        pytest.param({"load_async": False, "layerwise": True}, id="layerwise"),
        pytest.param({"layerwise": True}, id="layerwise_async"),
        pytest.param({"mp_transfer_mode": "lmcache_driven"}, id="lmcache_driven"),
        pytest.param(
            {"mp_transfer_mode": "lmcache_driven", "load_async": False}, id="lmcache_driven_sync"
        ),
    ],
)
def test_a_fresh_engine_loads_what_another_stored_and_answers_the_same(
    settings, expected, models, server, engines
):
    first = engines(models / "llama", server.url, **settings)
    cold = first.generate(list(PROMPTS.values()))
    assert tokens(cold) == list(expected.values())
    # Each prompt is new to the engine and to the server, but for the prefix that two share.
    assert cached(cold) == [0, 0, 0, 0, 0, 3 * CHUNK]
    assert_whole(first)

    second = engines(models / "llama", server.url, **settings)
    for name, ids in PROMPTS.items():
        second.reset()
        (warm,) = second.generate([ids])
        assert (name, warm["cached"]) == (name, LOADED[name])
        assert (name, warm["tokens"]) == (name, expected[name])
    second.reset()
    together = second.generate(list(PROMPTS.values()), together=True)
    assert tokens(together) == list(expected.values())
    assert_whole(second)


@pytest.mark.parametrize("load_async", [True, False], ids=["async", "sync"])
def test_chunked_prefill_stores_every_chunk(load_async, expected, models, server, engines):
    """A budget smaller than a prompt: stores come in pieces, several a request."""
    budget = {"max_num_batched_tokens": 80, "max_num_seqs": 4}
    engine = engines(models / "llama", server.url, llm=budget, load_async=load_async)
    assert tokens(engine.generate(list(PROMPTS.values()), together=True)) == list(expected.values())
    for name, ids in PROMPTS.items():
        engine.reset()
        (warm,) = engine.generate([ids])
        assert (name, warm["cached"]) == (name, LOADED[name])
        assert (name, warm["tokens"]) == (name, expected[name])
    assert_whole(engine)


def test_wrong_bytes_change_the_answer(expected, models, server, engines):
    """The control: were the wrong KV loaded, every comparison here would fail."""
    engine = engines(models / "llama", server.url)
    engine.generate([PROMPTS["long"]])
    assert scramble_payloads(server) == 4
    engine.reset()
    (wrong,) = engine.generate([PROMPTS["long"]])
    assert wrong["cached"] == LOADED["long"]
    assert wrong["tokens"] != expected["long"]


@pytest.mark.parametrize("load_async", [True, False], ids=["async", "sync"])
def test_an_unreadable_chunk_is_recomputed(load_async, expected, models, server, engines):
    engine = engines(models / "llama", server.url, load_async=load_async)
    engine.generate([PROMPTS["long"], PROMPTS["two chunks and a token"]])
    assert damage_headers(server, keep=2) == 4
    for name in ("two chunks and a token", "long"):
        engine.reset()
        (answer,) = engine.generate([PROMPTS[name]])
        assert (name, answer["tokens"]) == (name, expected[name])
    # What was recomputed was stored again.
    for name in ("two chunks and a token", "long"):
        engine.reset()
        (answer,) = engine.generate([PROMPTS[name]])
        assert (name, answer["cached"]) == (name, LOADED[name])
        assert (name, answer["tokens"]) == (name, expected[name])
    assert_whole(engine)


@pytest.mark.parametrize("load_async", [True, False], ids=["async", "sync"])
def test_a_server_killed_in_the_middle_of_a_batch_costs_recomputation_only(
    load_async, expected, models, engines
):
    with spawn_server(size_gb=0.2, chunk_size=CHUNK) as doomed:
        engine = engines(models / "llama", doomed.url, load_async=load_async)
        engine.generate([PROMPTS["long"], PROMPTS["shared prefix, one"]])
        for steps in (1, 3):
            engine.reset()
            answers = engine.generate(
                list(PROMPTS.values()), together=True, kill=doomed.pid, kill_after_steps=steps
            )
            assert tokens(answers) == list(expected.values())
            assert all(answer["finish"] == "length" for answer in answers)
        port = int(doomed.url.rsplit(":", 1)[1])
    engine.reset()
    assert tokens(engine.generate(list(PROMPTS.values()))) == list(expected.values())
    with spawn_server(port=port, size_gb=0.2, chunk_size=CHUNK):
        for _ in range(100):  # the engine reconnects by itself; each pass takes a while
            engine.reset()
            (answer,) = engine.generate([PROMPTS["long"]])
            assert answer["tokens"] == expected["long"]
            if answer["cached"]:
                break
        assert answer["cached"] == LOADED["long"]
        assert_whole(engine)


def reconnected(engine, expected):
    """Ask until the engine finds the server that took another's place."""
    for _ in range(100):  # each pass takes a while
        engine.reset()
        (answer,) = engine.generate([PROMPTS["two chunks exactly"]])
        assert answer["tokens"] == expected["two chunks exactly"]
        if answer["cached"]:
            return
    pytest.fail("the engine did not find the server")


@pytest.mark.parametrize("damage", [False, True], ids=["whole", "damaged"])
@pytest.mark.parametrize("load_async", [True, False], ids=["async", "sync"])
def test_what_a_server_has_written_to_a_tier_the_next_one_loads(
    load_async, damage, expected, models, engines, tmp_path
):
    """Drained, every chunk has gone down. Damaged files are misses, and computed again."""
    tier = {"l2_tier": (f"file://{tmp_path}/cache?size_gb=1",), "drain_timeout_seconds": 20.0}
    with spawn_server(size_gb=0.2, chunk_size=CHUNK, **tier) as first:
        engine = engines(models / "llama", first.url, load_async=load_async)
        engine.generate([PROMPTS["long"], PROMPTS["shared prefix, one"]])
        port = int(first.url.rsplit(":", 1)[1])
    files = [path for path in (tmp_path / "cache").rglob("*") if path.stat().st_size > CHUNK]
    files = [path for path in files if path.is_file()]
    assert len(files) == 300 // CHUNK + 3
    for path in files if damage else ():
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    with spawn_server(port=port, size_gb=0.2, chunk_size=CHUNK, **tier):
        reconnected(engine, expected)
        for name in ("long", "shared prefix, one"):
            engine.reset()
            (answer,) = engine.generate([PROMPTS[name]])
            assert (name, answer["tokens"]) == (name, expected[name])
            assert (name, answer["cached"]) == (name, 0 if damage else LOADED[name])
        assert_whole(engine)


def test_an_engine_started_without_a_server_runs_and_picks_it_up(expected, models, engines):
    with spawn_server(size_gb=0.1, chunk_size=CHUNK) as server:
        port = int(server.url.rsplit(":", 1)[1])
    engine = engines(models / "llama", f"tcp://127.0.0.1:{port}")
    assert tokens(engine.generate([PROMPTS["long"]])) == [expected["long"]]
    assert "lmcache-kernels serve" in engine.log()
    with spawn_server(port=port, size_gb=0.1, chunk_size=CHUNK):
        for _ in range(100):
            engine.reset()
            (answer,) = engine.generate([PROMPTS["long"]])
            assert answer["tokens"] == expected["long"]
            if answer["cached"]:
                break
        assert answer["cached"] == LOADED["long"]


def test_a_server_with_another_chunk_size_is_refused_naming_both(expected, models, engines):
    with spawn_server(size_gb=0.1, chunk_size=2 * CHUNK) as server:
        engine = engines(models / "llama", server.url, policy="fail")
        assert tokens(engine.generate([PROMPTS["long"]])) == [expected["long"]]
        log = engine.log()
        assert f"chunks of {2 * CHUNK} tokens, this client {CHUNK}" in log
        # A policy under which a failed load ends its request is pointed out, once.
        assert log.count('"kv_load_failure_policy": "recompute"') == 1
        engine.reset()
        (answer,) = engine.generate([PROMPTS["long"]])
        assert (answer["cached"], answer["tokens"]) == (0, expected["long"])


@pytest.mark.parametrize("layerwise", [False, True], ids=["whole", "layerwise"])
def test_preempted_requests_answer_the_same_and_leave_good_chunks(
    layerwise, models, server, engines
):
    """So few blocks that requests push each other out while their stores run."""
    prompts = [prompt(150, seed=20 + k) for k in range(6)]
    plain = engines(models / "llama")
    wanted = tokens(plain.generate(prompts, together=True, max_tokens=100))
    tight = {"num_gpu_blocks_override": 24, "max_model_len": 512}
    engine = engines(models / "llama", server.url, llm=tight, layerwise=layerwise)
    answers = engine.generate(prompts, together=True, max_tokens=100)
    assert tokens(answers) == wanted
    for ids, answer in zip(prompts, wanted, strict=True):
        engine.reset()
        (warm,) = engine.generate([ids], max_tokens=100)
        assert warm["cached"] == 2 * CHUNK
        assert warm["tokens"] == answer
    assert_whole(engine)


def test_a_model_with_sliding_windows_stores_and_loads_every_group(models, engines):
    """Several KV-cache groups with block tables of their own; damage fails the whole request."""
    ids = prompt(300, seed=30)
    whole = prompt(4 * CHUNK, seed=31)
    plain = engines(models / "sliding")
    wanted, wanted_whole = tokens(plain.generate([ids, whole]))
    with spawn_server(size_gb=0.2, chunk_size=CHUNK) as server:
        first = engines(models / "sliding", server.url)
        assert tokens(first.generate([ids, whole])) == [wanted, wanted_whole]
        second = engines(models / "sliding", server.url)
        (warm,) = second.generate([ids])
        assert (warm["cached"], warm["tokens"]) == (4 * CHUNK, wanted)
        (warm,) = second.generate([whole])
        # Of a full hit, the last block is left to compute.
        assert (warm["cached"], warm["tokens"]) == (4 * CHUNK - 32, wanted_whole)
        damage_headers(server)
        second.reset()
        (hurt,) = second.generate([ids])
        assert hurt["tokens"] == wanted
        assert_whole(second)


@pytest.mark.parametrize("keep", [4, 2, 0])
def test_a_window_makes_a_failed_load_fail_its_whole_request(keep, models, engines):
    """The engine leaves out what lies before the window of the promised end; from an earlier one
    it could not go on."""
    ids = prompt(330, seed=50)
    plain = engines(models / "windowed")
    (wanted,) = tokens(plain.generate([ids], max_tokens=12))
    with spawn_server(size_gb=0.2, chunk_size=CHUNK) as server:
        engine = engines(models / "windowed", server.url)
        engine.generate([ids], max_tokens=12)
        engine.reset()
        (warm,) = engine.generate([ids], max_tokens=12)
        assert (warm["cached"], warm["tokens"]) == (5 * CHUNK, wanted)
        assert damage_headers(server, keep=keep) == 5 - keep
        engine.reset()
        (hurt,) = engine.generate([ids], max_tokens=12)
        assert hurt["tokens"] == wanted
        assert_whole(engine)


@pytest.mark.parametrize("load_async", [True, False], ids=["async", "sync"])
def test_requests_that_share_a_prefix_whose_load_fails_store_nothing_wrong(
    load_async, models, server, engines
):
    """Two at once: the engine lets the second build on what is being loaded for the first."""
    shared = prompt(2 * CHUNK, seed=60)
    prompts = [shared + prompt(40, seed=61), shared + prompt(100, seed=62)]
    plain = engines(models / "llama")
    wanted = tokens(plain.generate(prompts, max_tokens=12))
    engine = engines(models / "llama", server.url, load_async=load_async)
    engine.generate([[*shared, 5]], max_tokens=1)
    for _ in range(3):
        engine.reset()
        damage_headers(server, keep=1)
        assert tokens(engine.generate(prompts, max_tokens=12, together=True)) == wanted
        for ids, answer in zip(prompts, wanted, strict=True):
            engine.reset()
            (later,) = engine.generate([ids], max_tokens=12)
            assert later["tokens"] == answer
    assert_whole(engine)


def test_a_model_configured_otherwise_finds_nothing(models, server, engines):
    """The same weights with another rotary base compute other keys."""
    ids = prompt(330, seed=70)
    other = {"hf_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}}
    first = engines(models / "llama", server.url)
    (usual,) = first.generate([ids])
    plain = engines(models / "llama", llm=other)
    (wanted,) = tokens(plain.generate([ids]))
    assert wanted != usual["tokens"]
    second = engines(models / "llama", server.url, llm=other)
    (answer,) = second.generate([ids])
    assert (answer["cached"], answer["tokens"]) == (0, wanted)


def test_the_default_shape_with_separate_processes_works_by_name_alone(
    expected, models, server, engines
):
    """Engine core and worker in processes of their own, the connector found as a plug-in."""
    engine = engines(
        models / "llama",
        server.url,
        environment={"VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
        by_name=True,
    )
    assert tokens(engine.generate([PROMPTS["long"]])) == [expected["long"]]
    engine.reset()
    (warm,) = engine.generate([PROMPTS["long"]])
    assert (warm["cached"], warm["tokens"]) == (LOADED["long"], expected["long"])
