"""Stores into a full store, with and without full collections."""

from __future__ import annotations

import gc

from bench.options import Options
from bench.results import OURS, Document, problems
from bench.server import stores


def test_a_row_has_the_worst_call_of_both(monkeypatch):
    before = gc.get_threshold()
    monkeypatch.setattr(stores, "STORED", 5120)
    (row,) = stores.run(Options())
    assert row.title == "stores 512 chunks store, 5120 stored"
    assert problems(Document(3, "server", {}, [row])) == []
    assert set(row.seconds) == {OURS, stores.COLLECTED}
    assert row.parts["worst"] >= row.seconds[OURS].p50
    assert gc.get_threshold() == before


def test_it_is_left_out_when_something_else_is_wanted():
    assert stores.run(Options(only="load")) == []
