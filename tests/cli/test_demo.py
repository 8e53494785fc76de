"""The demo, on a CPU."""

from __future__ import annotations

import pytest

from lmcache_kernels.adapters.cli import demo


@pytest.mark.parametrize("size_mb", [1, 4])
def test_a_small_demo_needs_little_memory(size_mb, monkeypatch, capsys):
    asked = []

    def spawn_server(*, size_gb, chunk_size):
        asked.append(size_gb)
        return demo_server(size_gb=size_gb, chunk_size=chunk_size)

    demo_server = demo.spawn_server
    monkeypatch.setattr(demo, "spawn_server", spawn_server)
    assert demo.run_demo(size_mb=size_mb, device="cpu") == 0
    assert capsys.readouterr().out.count("yes") == len(demo.LAYOUTS)
    assert asked == [(2 * size_mb + 1) / 1024]
