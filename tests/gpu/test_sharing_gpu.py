"""GPU memory and events shared between two real processes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from share_peer import SharePeer

from lmcache_kernels.errors import LocalProtocolError, PeerGone
from lmcache_kernels.transfer.sharing.descriptors import decode, encode
from lmcache_kernels.transfer.sharing.ipc_events import ExportedEvents, import_event
from lmcache_kernels.transfer.sharing.wrapping import open_kv_caches, wrap_kv_caches

pytestmark = pytest.mark.gpu

DEVICE = "cuda:0"
HALF_A_SECOND = 1_000_000_000
"""Cycles, about."""


@pytest.fixture
def peer():
    with SharePeer() as found:
        yield found


def settle():
    torch.cuda.current_stream(DEVICE).synchronize()


def cache(seed, shape, dtype=torch.float16):
    """Any bits, NaN among them."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    tensor = torch.empty(shape, dtype=dtype, device=DEVICE)
    tensor.view(torch.uint8).random_(generator=generator)
    settle()
    return tensor


def elements(tensor):
    """As SharePeer.read gives them."""
    raw = tensor.cpu().unsqueeze(-1).view(torch.uint8).numpy().tobytes()
    return [raw[i : i + tensor.itemsize] for i in range(0, len(raw), tensor.itemsize)]


def test_a_peer_sees_the_cache_and_its_writes_come_back(peer):
    """Views inside one allocation of torch, and one of many MiB; gaps, other orders of axes, empty."""
    raw = cache(1, (64, 64), torch.uint8)
    views = {
        "raw": raw,
        "front": raw[:8, 16:48],
        "half": raw.view(torch.bfloat16)[9:, ::2].t(),
        "empty": torch.empty(0, 3, device=DEVICE),
        "large": cache(2, (3, 4 << 20))[1:, 5:1000],
    }
    before = {name: elements(view) for name, view in views.items()}
    wrapped = wrap_kv_caches(views)
    assert decode(encode(wrapped.descriptors)) == tuple(wrapped.descriptors)
    shares = [one.share for one in wrapped.descriptors]
    assert shares[0].handle == shares[1].handle == shares[2].handle != shares[4].handle
    assert wrap_kv_caches(views).descriptors == wrapped.descriptors
    assert peer.open(encode(wrapped.descriptors)) == 5
    assert peer.open(encode(wrapped.descriptors[:2])) == 7, "a second time"
    for index, (name, view) in enumerate(views.items()):
        assert peer.read(index) == before[name]
        form = [list(view.shape), list(view.stride()), str(view.dtype), "cuda"]
        assert peer.form(index)[:4] == form
    assert peer.form(1)[4] == peer.form(6)[4] == 16
    assert peer.form(5)[4] == 0
    expected = raw.clone()
    expected[:8, 16:48] = 0x5A
    settle()
    peer.write(1, 0x5A)
    assert torch.equal(raw, expected)
    peer.close()
    settle()
    assert torch.equal(raw, expected)
    assert peer.open(encode(wrapped.descriptors)) == 5, "opened again after closing"
    assert peer.read(0) == elements(raw)


def test_this_process_opens_the_peers_memory(peer):
    """The other direction, with addresses: closed with the last tensor, and gone with its owner."""
    data = peer.wrap(3 << 20, DEVICE)
    first, second = open_kv_caches(decode(data)), open_kv_caches(decode(data))
    assert first.opened[0].address == second.opened[0].address
    assert first.opened[0].device == DEVICE
    assert set(first.tensors[0].unique().tolist()) == {7}
    settle()
    first.close()
    assert set(second.tensors[0][-1:].tolist()) == {7}
    settle()
    second.close()
    peer.kill()
    with pytest.raises(PeerGone, match="has its owner ended"):
        open_kv_caches(decode(data))
    assert torch.ones(3, device=DEVICE).sum().item() == 3, "the failure left nothing behind"


def test_a_process_opens_what_it_shares_itself():
    tensor = cache(3, (5, 7))
    wrapped = wrap_kv_caches({"layer": tensor[2:]})
    opened = open_kv_caches(wrapped.descriptors)
    assert opened.opened[0].address == tensor[2:].data_ptr()
    opened.tensors[0].zero_()
    assert not tensor[2:].any()
    settle()
    opened.close()


def test_a_peer_waits_for_an_event_recorded_behind_queued_work(peer):
    """It reads what is written after half a second; without the wait it would read what was."""
    tensor = torch.zeros(1 << 20, dtype=torch.uint8, device=DEVICE)
    settle()
    wrapped = wrap_kv_caches({"layer": tensor[:4096]})
    peer.open(encode(wrapped.descriptors))
    assert set(peer.read(0)) == {b"\x00"}, "and both have a context now"
    exported = ExportedEvents()
    event = torch.cuda.Event(interprocess=True)
    stream = torch.cuda.Stream(DEVICE)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(HALF_A_SECOND)
        tensor.fill_(8)
        event.record(stream)
    handle = exported.export(event)
    assert len(handle) == 64
    early = event.query()
    del event
    peer.wait(handle)
    assert set(peer.read(0)) == {b"\x08"}
    exported.acknowledge(handle)
    assert len(exported) == 0
    assert not early, "the work was still queued when the peer was told"
    settle()


def test_events_of_this_process_and_of_none():
    exported = ExportedEvents()
    event = torch.cuda.Event(interprocess=True)
    event.record()
    assert import_event(exported.export(event), DEVICE) is event
    with pytest.raises(PeerGone, match="event cannot be opened"):
        import_event(bytes(range(64)), DEVICE)
    with pytest.raises(LocalProtocolError, match="cannot be exported"):
        exported.export(torch.cuda.Event())
    assert torch.ones(3, device=DEVICE).sum().item() == 3, "the failure left nothing behind"


def test_thousands_of_events_come_and_go():
    """The driver gives the handles of freed events to new ones."""
    exported, handles = ExportedEvents(), set()
    for _ in range(5000):
        event = torch.cuda.Event(interprocess=True)
        event.record()
        handle = exported.export(event)
        assert import_event(handle, DEVICE) is event
        handles.add(handle)
        exported.acknowledge(handle)
        del event
    assert len(exported) == 0
    assert len(handles) < 5000, "else this shows nothing"


def test_memory_of_expandable_segments_is_refused_with_a_reason():
    script = (
        "import torch\n"
        "from lmcache_kernels.errors import ConfigError\n"
        "from lmcache_kernels.transfer.sharing.wrapping import wrap_one_kv_cache\n"
        "try:\n"
        "    wrap_one_kv_cache(torch.zeros(1 << 22, device='cuda:0'))\n"
        "except ConfigError as error:\n"
        "    assert 'expandable segments' in str(error), error\n"
        "else:\n"
        "    raise AssertionError('it was wrapped')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
