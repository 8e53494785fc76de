"""The tiers' benchmark: every tier that is here, beside the plain use of what it stands on."""

from __future__ import annotations

import shutil

from bench import tiers
from bench.options import Options
from bench.results import OURS, Document, problems
from bench.tiers import PLAIN


def test_every_direction_is_a_row_that_can_be(monkeypatch, capsys):
    monkeypatch.setattr(tiers, "SLOTS", (64 << 10,))
    rows = tiers.run(Options(size_mb=1, rounds=2, only="files"))
    assert [row.title for row in rows] == [
        "files 16 x 64 KiB put, 1 MiB",
        "files 16 x 64 KiB get, 1 MiB",
        "files 16 x 64 KiB exists",
    ]
    assert problems(Document(3, "tiers", {}, rows)) == []
    assert all(row.bit_exact and set(row.seconds) == {OURS, PLAIN} for row in rows)
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_a_tier_whose_service_is_missing_is_left_out(monkeypatch, capsys):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert tiers.run(Options(size_mb=1, rounds=2, only="valkey")) == []
    assert "not measured: needs redis-server" in capsys.readouterr().out
