"""A loop beside transfers: what is taken as copied meanwhile, who is timed when, what fails how."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from bench import decode_loop, sustained
from bench.cases import KV_FIRST, Case, Model
from bench.flows import traffic
from bench.loops import LAYERS, LLAMA_8B_SHAPES, decode_steps, gemm_steps
from bench.results import problems
from bench.saturation import (
    ALONE,
    IN_FLIGHT,
    Driven,
    Flow,
    Window,
    rate_between,
    saturated,
    time_beside,
)
from bench.timing import Spread
from lmcache_kernels.transfer.moving.moves import Over

TINY = Case(Model("tiny", layers=2, heads=3, dim=8), KV_FIRST)


def flow(queue=Over, direction="gather", nbytes=10):
    return Flow(direction, queue, nbytes)


@pytest.mark.parametrize(
    ("began", "ended", "transfers"),
    [(0.0, 4.0, 4), (1.0, 2.0, 1), (0.5, 2.5, 2), (1.25, 1.75, 0.5), (3.0, 4.0, 1)],
)
def test_transfers_count_by_how_much_of_them_is_in_the_window(began, ended, transfers):
    ends = [0.0, 1.0, 2.0, 3.0, 4.0]
    assert rate_between(ends, 100, began, ended) == pytest.approx(100 * transfers / (ended - began))


def test_a_window_half_of_which_is_slow_has_the_mean():
    assert rate_between([0, 1, 2, 6], 10, 0, 6) == pytest.approx(5)


@pytest.mark.parametrize(("began", "ended"), [(-0.1, 1.0), (0.5, 2.1), (1.0, 1.0), (1.5, 0.5)])
def test_a_window_that_was_not_filled_has_no_rate(began, ended):
    with pytest.raises(ValueError, match="whole of the window"):
        rate_between([0.0, 1.0, 2.0], 1, began, ended)
    with pytest.raises(ValueError, match="whole of the window"):
        rate_between([], 1, began, ended)


class Held:
    """Transfers that are over when the test says so."""

    def __init__(self):
        self.queued = []
        self.more = threading.Semaphore(0)

    def __call__(self):
        over = threading.Event()
        self.queued.append(over)
        self.more.release()
        return self.Point(over)

    class Point:
        def __init__(self, over):
            self.wait = over.wait


def test_as_many_are_queued_as_said_and_all_are_waited_for():
    held, stop = Held(), threading.Event()
    driven = Driven(flow(held))
    thread = threading.Thread(target=driven.drive, args=(stop,))
    thread.start()
    for _ in range(IN_FLIGHT):
        assert held.more.acquire(timeout=10)
    assert not driven.under_way.is_set()
    assert len(held.queued) == IN_FLIGHT
    held.queued[0].set()
    assert driven.under_way.wait(10)
    assert held.more.acquire(timeout=10)
    assert len(held.queued) == IN_FLIGHT + 1
    stop.set()
    began = time.perf_counter()
    for over in held.queued:
        over.set()
    thread.join(10)
    assert not thread.is_alive()
    ends = driven._ends
    assert len(ends) == IN_FLIGHT + 1
    assert driven.rate(Window(1.0, ends[0], ends[-1])) > 0
    assert ends[-1] >= began


def test_the_flows_go_on_for_the_whole_of_the_window():
    with saturated([flow(), flow(direction="scatter")]) as driven:
        began = time.perf_counter()
        ended = time.perf_counter()
    assert [one.flow.direction for one in driven] == ["gather", "scatter"]
    assert all(one.rate(Window(1.0, began, ended)) > 0 for one in driven)


def test_a_flow_that_fails_is_heard_of():
    def broken():
        raise RuntimeError("no such engine")

    with pytest.raises(RuntimeError, match="no such engine"), saturated([flow(broken)]):
        pass


class Scripted:
    """A loop whose steps take what the test says."""

    def __init__(self, seconds):
        self.seconds = iter(seconds)

    def window(self):
        began = time.perf_counter()
        while time.perf_counter() == began:
            pass
        return Window(next(self.seconds), began, time.perf_counter())


def test_everyone_is_timed_once_a_round_each_comes_first_in_turn_and_warming_up_does_not_count():
    warm_up, rounds = (9.0, 9.0, 9.0), (1.0, 2.0, 3.0, 2.0, 3.0, 1.0, 3.0, 1.0, 2.0)
    traffic = {"ours": [flow(), flow(direction="scatter")], "theirs": [flow()]}
    found = time_beside(Scripted([*warm_up, *rounds]), traffic, rounds=3)
    assert found.seconds == {
        ALONE: Spread(1.0, 1.0, 1.0),
        "ours": Spread(2.0, 2.0, 2.0),
        "theirs": Spread(3.0, 3.0, 3.0),
    }
    assert {name: set(rates) for name, rates in found.rates.items()} == {
        "ours": {"gather", "scatter"},
        "theirs": {"gather"},
    }


def test_alone_is_beside_nothing():
    with saturated([]) as driven:
        assert driven == []


@pytest.mark.parametrize("mode", list(decode_loop.MODES))
def test_a_mode_becomes_a_row(rig, mode, monkeypatch, make_document):
    monkeypatch.setattr(decode_loop, "CASE", TINY)
    copy = {"hbm_copy": Spread(1.0, 1.0, 1.0)}
    loop = Scripted([1e-3] * 9)
    with traffic(rig, TINY, decoding=True) as both:
        row = decode_loop.measure_beside("decode", mode, loop, 7, both, rig, copy)
    assert row.bit_exact
    assert row.title == f"decode {TINY.name} {mode}"
    assert set(row.beside["ours"]) == set(decode_loop.MODES[mode])
    assert row.slowdown("ours") == pytest.approx(1.0)
    assert row.moved == {
        "alone": 7,
        "ours": 7,
        "plain_copies": 7,
        "hbm_copy": 2 * decode_loop.COPY_BYTES,
    }
    assert set(row.absent) == {"lmcache_staged"}
    assert problems(make_document(row)) == []
    assert "x1.000 at" in decode_loop.line(row)
    assert "of the rate of a copy" in decode_loop.line(row)


def test_a_loop_that_memory_does_not_limit_counts_no_bytes(rig, monkeypatch, make_document):
    monkeypatch.setattr(decode_loop, "CASE", TINY)
    with traffic(rig, TINY, decoding=True) as both:
        loop = Scripted([1e-3] * 9)
        row = decode_loop.measure_beside("gemm", "gather", loop, 0, both, rig, {})
    assert row.moved == {}
    assert problems(make_document(row)) == []


def test_what_goes_on_both_ways_becomes_a_row(rig, tiny_case, make_document):
    with traffic(rig, tiny_case, decoding=False) as both:
        row = sustained.measure_sustained(tiny_case, both, rig, seconds=0.01)
    assert row.bit_exact
    assert row.title == f"sustained {tiny_case.name} both, 1024 MiB"
    assert set(row.seconds) == {"ours", "plain_copies"}
    assert set(row.absent) == {"lmcache_staged"}
    assert row.of_ceiling("ours") == row.ratios["plain_copies"]
    assert problems(make_document(row)) == []


def test_a_step_reads_every_weight_of_the_model():
    shapes = [(8, 12), (8, 8), (8, 20), (10, 8)]  # as Llama-3-8B's, which only look into a part
    steps = decode_steps("cpu", layers=2, shapes=shapes)
    assert steps.nbytes == 2 * 2 * sum(i * o for i, o in shapes)
    steps.run()
    assert LAYERS * 2 * sum(i * o for i, o in LLAMA_8B_SHAPES) == pytest.approx(13.96e9, rel=1e-3)


def test_the_large_product_is_a_product():
    steps = gemm_steps("cpu", size=32)
    product = steps.run()
    assert product.shape == (32, 32)
    assert torch.isfinite(product).all()
