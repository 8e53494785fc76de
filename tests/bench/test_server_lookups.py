"""Lookups that find what they name, a row for each size."""

from __future__ import annotations

import pytest

from bench.options import Options
from bench.results import OURS, Document, problems
from bench.server import lookups
from bench.server.lookups import HASHING, Server
from lmcache_kernels.transfer.messages import EndSession


def test_every_size_is_a_row_that_can_be(monkeypatch, capsys):
    monkeypatch.setattr(lookups, "STORED", (70, 1500))
    monkeypatch.setattr(lookups, "NAMED", (1, 64))
    rows = lookups.run(Options(rounds=5))
    assert [row.title for row in rows] == [
        f"lookup {named} chunks lookup, {stored} stored"
        for named in (1, 64)
        for stored in (70, 1500)
    ]
    assert problems(Document(3, "server", {}, rows)) == []
    assert all(set(row.seconds) == {OURS, HASHING} for row in rows)
    assert all(row.seconds[OURS].p99 for row in rows)
    assert len(capsys.readouterr().out.splitlines()) == 4


def test_only_servers_that_are_wanted_are_made(monkeypatch):
    made = []
    monkeypatch.setattr(lookups, "STORED", (70, 1500))
    monkeypatch.setattr(lookups, "NAMED", (1, 64))
    monkeypatch.setattr(Server, "with_chunks", lambda stored: made.append(stored))
    monkeypatch.setattr(lookups, "measure", lambda servers, named, rounds: [])
    assert lookups.run(Options(only="64 chunks lookup, 70 stored")) == []
    assert made == [70]


def test_a_lookup_that_misses_is_no_measurement():
    made = Server.with_chunks(10)
    made.lookup(10, 0)
    made.service.handle(EndSession(request="r0"), 1.0)
    made.digests[5] = bytes(32)
    with pytest.raises(ValueError, match="expected 10 chunks found"):
        made.lookup(10, 1)
