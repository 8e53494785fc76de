"""Events whose handles were given away live until the peer no longer needs them."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref

import pytest

from lmcache_kernels.errors import LocalProtocolError, RemoteProtocolError
from lmcache_kernels.transfer.sharing.ipc_events import (
    EVENTS_KEPT,
    ExportedEvents,
    import_event,
)


class FileEvent:
    """Exists for other processes as long as it exists here, as events do: a file."""

    def __init__(self, directory, number=0):
        self._path = directory / str(number)
        self._path.touch()
        weakref.finalize(self, self._path.unlink)

    def ipc_handle(self):
        return str(self._path).encode()


class Event:
    def __init__(self, number):
        self._number = number

    def ipc_handle(self):
        return self._number.to_bytes(64, "big")


OPENS_WHEN_TOLD = """
import os, sys
handle = sys.stdin.readline().strip()
sys.stdin.readline()
print(os.path.exists(handle), flush=True)
"""


def test_fault_b08_a_handed_out_event_outlives_its_maker_until_acknowledged(tmp_path):
    """The peer is slow to open it; everything here forgets the event meanwhile."""
    exported = ExportedEvents()
    peer = subprocess.Popen(
        [sys.executable, "-c", OPENS_WHEN_TOLD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    handle = exported.export(FileEvent(tmp_path))
    peer.stdin.write(f"{handle.decode()}\n")
    peer.stdin.flush()
    gc.collect()
    for number in range(1, EVENTS_KEPT):
        exported.export(Event(number))
    out, _ = peer.communicate("now\n", timeout=60)
    assert out == "True\n"
    exported.acknowledge(handle)
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_fault_b08_without_acknowledgements_the_number_is_bounded():
    """10 000 requests of a peer that is gone: the youngest are kept, and no more."""
    exported, alive = ExportedEvents(), weakref.WeakSet()
    for number in range(10_000):
        event = Event(number)
        alive.add(event)
        exported.export(event)
        del event
    assert len(exported) == len(alive) == EVENTS_KEPT
    assert {event._number for event in alive} == set(range(10_000 - EVENTS_KEPT, 10_000))
    exported.acknowledge((3).to_bytes(64, "big"))
    exported.acknowledge(b"never seen")
    assert len(exported) == EVENTS_KEPT


def test_fault_b08_acknowledged_events_do_not_pile_up():
    """10 000 requests, each acknowledged at some later time."""
    exported, most = ExportedEvents(), 0
    for number in range(10_000):
        exported.export(Event(number))
        if number >= 100:
            exported.acknowledge(Event(number - 100).ipc_handle())
        most = max(most, len(exported))
    assert most <= 101


def test_each_export_of_an_event_is_acknowledged():
    exported, event = ExportedEvents(limit=2), Event(1)
    handles = {exported.export(event) for _ in range(3)}
    for left in (1, 1, 0):
        exported.acknowledge(*handles)
        assert len(exported) == left
    exported.export(event)
    exported.export(Event(2))
    exported.export(event)  # the youngest again
    exported.export(Event(3))
    exported.acknowledge(*handles)
    assert len(exported) == 2, "the second event had to go"


def test_many_threads_export_and_acknowledge():
    exported = ExportedEvents()

    def work(first):
        for number in range(first, first + 500):
            exported.acknowledge(exported.export(Event(number)))

    threads = [threading.Thread(target=work, args=(i * 1000,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(exported) == 0


def test_an_event_for_this_process_alone_is_refused():
    class Private:
        def ipc_handle(self):
            raise RuntimeError("not made for it")

    exported = ExportedEvents()
    with pytest.raises(LocalProtocolError, match="cannot be exported: not made for it"):
        exported.export(Private())
    assert len(exported) == 0


@pytest.mark.parametrize("handle", [b"", b"x" * 63, b"x" * 65])
def test_what_is_no_handle_is_refused(handle):
    with pytest.raises(RemoteProtocolError, match=f"expected 64 bytes, got {len(handle)}"):
        import_event(handle, "cuda:0")
