"""Which context an engine gets."""

from __future__ import annotations

import logging
from contextlib import contextmanager

import pytest
import torch

from lmcache_kernels.errors import ConfigError, LayoutError
from lmcache_kernels.transfer import context_factory
from lmcache_kernels.transfer.cache_forms import ShardPart
from lmcache_kernels.transfer.context_factory import create_transfer_context
from lmcache_kernels.transfer.embedded import EmbeddedCache
from lmcache_kernels.transfer.engine_driven.context import EngineDrivenContext
from lmcache_kernels.transfer.kv_groups import KVGroup
from lmcache_kernels.transfer.lmcache_driven import recorded_events
from lmcache_kernels.transfer.lmcache_driven.context import LmcacheDrivenContext
from lmcache_kernels.transfer.sharing.devices import DeviceDescription
from lmcache_kernels.transfer.transfer_mode import transfer_mode


def test_mp_004_what_is_configured_hides_the_environment():
    """A mode that is given counts, also if it is auto; None is none."""
    environment = {"LMCACHE_MP_TRANSFER_MODE": "lmcache_driven"}
    assert transfer_mode(None, environment) == "lmcache_driven"
    assert transfer_mode("auto", environment) == "engine_driven"
    assert transfer_mode("engine_driven", environment) == "engine_driven"
    assert transfer_mode(None, {}) == "engine_driven"


def test_mp_005_modes_are_read_in_any_case_and_others_refused():
    """An unknown one is an error that lists the three."""
    assert transfer_mode("LMCACHE_DRIVEN") == "lmcache_driven"
    with pytest.raises(
        ValueError, match="engine_driven, lmcache_driven, auto, got 'foo'"
    ) as caught:
        transfer_mode("foo")
    assert isinstance(caught.value, ConfigError)
    with pytest.raises(ConfigError, match="got ''"):
        transfer_mode(None, {"LMCACHE_MP_TRANSFER_MODE": ""})


@pytest.fixture
def make():
    with EmbeddedCache(1 << 16, chunk_tokens=8) as cache:

        @contextmanager
        def made(groups, mode=None, **options):
            context = create_transfer_context(
                groups, mode, chunk_tokens=8, part=ShardPart(), instance=1, port=cache, **options
            )
            yield context
            context.close()

        yield made


def groups_of(*tensors):
    return [KVGroup.of(tensor, "block token dim") for tensor in tensors]


@pytest.mark.parametrize(
    ("mode", "kind"),
    [
        ("auto", EngineDrivenContext),
        ("engine_driven", EngineDrivenContext),
        ("lmcache_driven", LmcacheDrivenContext),
    ],
)
def test_each_mode_has_its_context(make, mode, kind, caplog):
    caplog.set_level(logging.INFO, "lmcache_kernels.transfer.context_factory")
    with make(groups_of(torch.zeros(4, 8, 16)), mode) as context:
        assert type(context) is kind
        context.register()
        assert context.layout.nbytes == 512
    (record,) = [r for r in caplog.records if r.name == context_factory.__name__]
    assert record.getMessage().startswith("transfer context for a cache on cpu: ")


def test_both_contexts_name_what_they_store_alike(make):
    tensor = torch.zeros(4, 8, 16)
    with (
        make(groups_of(tensor), "engine_driven") as one,
        make(groups_of(tensor), "lmcache_driven") as other,
    ):
        assert one.shard == other.shard
        assert one.layout == other.layout


@pytest.mark.parametrize("mode", ["engine_driven", "lmcache_driven"])
def test_caches_that_no_context_can_have(make, mode):
    with pytest.raises(ValueError, match="got no group"), make([], mode):
        pass
    apart = groups_of(torch.zeros(4, 8, 16))
    with (
        pytest.raises(LayoutError, match="multiple of the block size 3"),
        make(groups_of(torch.zeros(4, 3, 16)), mode),
    ):
        pass
    with (
        pytest.raises(LayoutError, match=r"bytes in memory, got"),
        make([*apart, *groups_of(torch.zeros(4, 8, 16, device="meta"))], mode),
    ):
        pass


def test_a_device_that_cannot_share_is_told_of_the_other_mode(make, monkeypatch):
    gone = DeviceDescription("cpu", "cpu", lambda: False, lambda tensor: None, lambda d: None)
    monkeypatch.setattr(context_factory, "backend_for", lambda kind: gone)
    groups = groups_of(torch.zeros(4, 8, 16))
    with (
        pytest.raises(ValueError, match="is not available; use the transfer mode engine_driven"),
        make(groups, "lmcache_driven"),
    ):
        pass

    def unknown(kind):
        raise LayoutError(f"device type: got {kind}")

    monkeypatch.setattr(context_factory, "backend_for", unknown)
    with (
        pytest.raises(ValueError, match="use the transfer mode engine_driven"),
        make(groups, "lmcache_driven"),
    ):
        pass


def test_events_that_cannot_be_shared_are_noticed_before_anything_is(make, monkeypatch):
    def refuse(device):
        raise ConfigError("events cannot be shared")

    tensor = torch.zeros(4, 8, 16)
    before = tensor.data_ptr()
    monkeypatch.setattr("lmcache_kernels.transfer.lmcache_driven.context.recorded_events", refuse)
    with pytest.raises(ConfigError), make(groups_of(tensor), "lmcache_driven"):
        pass
    assert tensor.data_ptr() == before
    assert recorded_events.NoEvents().record() == b""
