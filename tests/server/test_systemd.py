"""What systemd is told: by datagrams, if it has asked, and never at the server's expense."""

from __future__ import annotations

import socket

import pytest

from lmcache_kernels.adapters.server import systemd


@pytest.fixture(params=["path", "abstract"])
def manager(request, tmp_path, monkeypatch):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        name = str(tmp_path / "notify")
        if request.param == "abstract":
            listening.bind(f"\0{name}")
            name = f"@{name}"
        else:
            listening.bind(name)
        monkeypatch.setenv("NOTIFY_SOCKET", name)
        listening.settimeout(10)
        yield listening


def test_states_arrive_as_they_are(manager):
    systemd.notify(systemd.READY)
    systemd.notify(systemd.reloading())
    systemd.notify(systemd.STOPPING)
    assert manager.recv(100) == b"READY=1"
    first, second = manager.recv(100).split(b"\n")
    assert first == b"RELOADING=1"
    assert int(second.removeprefix(b"MONOTONIC_USEC=")) > 0
    assert manager.recv(100) == b"STOPPING=1"


@pytest.mark.parametrize(
    "where", ["", "/nowhere/at/all", "@lmcache-kernels-nobody", "relative", "a" * 200]
)
def test_nobody_there_harms_nobody(where, monkeypatch, caplog):
    monkeypatch.setenv("NOTIFY_SOCKET", where)
    systemd.notify(systemd.READY)
    assert ("was not told" in caplog.text) == bool(where)


def test_a_manager_that_does_not_read_is_not_waited_for(manager, caplog):
    for _ in range(5000):
        systemd.notify(systemd.READY)
        if "was not told" in caplog.text:
            return
    pytest.fail("its queue has no end")
