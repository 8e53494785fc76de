"""Device backends: the built-in ones, plug-ins, and which one is used."""

from __future__ import annotations

import subprocess
import sys
from contextlib import contextmanager

import pytest
import torch

from lmcache_kernels.errors import ConfigError, LayoutError
from lmcache_kernels.transfer.sharing import devices
from lmcache_kernels.transfer.sharing.descriptors import PluginShare, describe
from lmcache_kernels.transfer.sharing.devices import (
    BACKEND_VARIABLE,
    DeviceDescription,
    backend_for,
    backend_named,
    discover,
)
from lmcache_kernels.transfer.sharing.opening import Opened
from lmcache_kernels.transfer.sharing.wrapping import (
    open_kv_caches,
    wrap_kv_caches,
    wrap_one_kv_cache,
)


class PlugIn:
    """Shares tensors of the meta device, which have no bytes, and says what it was told."""

    def __init__(self):
        self.events = []

    @contextmanager
    def wrap(self, tensor):
        share = PluginShare(backend="ghost", handle=b"boo", nbytes=tensor.nbytes, offset=0)
        try:
            yield describe(tensor, share)
        except BaseException:
            self.events.append(f"undone {len(tensor)}")
            raise
        self.events.append(f"settled {len(tensor)}")

    def open(self, descriptor):
        assert descriptor.share.handle == b"boo"
        whole = torch.zeros(descriptor.share.nbytes, dtype=torch.uint8)
        return Opened(descriptor, whole, lambda: self.events.append("released"))


def description(backend="ghost", device_type="meta", available=True, plug_in=None):
    plug_in = plug_in or PlugIn()
    return DeviceDescription(device_type, backend, lambda: available, plug_in.wrap, plug_in.open)


class Entry:
    """An entry point, as far as it is used."""

    def __init__(self, name, loaded):
        self.name, self._loaded = name, loaded

    def load(self):
        if isinstance(self._loaded, BaseException):
            raise self._loaded
        return self._loaded


def entry(found):
    return Entry(found.backend_name, found)


@pytest.fixture
def installed(monkeypatch):
    def install(*found):
        table = discover([entry(one) for one in found])
        monkeypatch.setattr(devices, "backends", lambda: table)

    monkeypatch.delenv(BACKEND_VARIABLE, raising=False)
    return install


def test_mp_073_an_unknown_device_type_is_a_value_error():
    """The message names the types there are."""
    tensor = torch.empty(3, device="meta")
    for wrap in (wrap_one_kv_cache, lambda one: wrap_kv_caches({"layer": one})):
        with pytest.raises(ValueError, match="expected one of cpu, cuda, got 'meta'") as caught:
            wrap(tensor)
        assert isinstance(caught.value, LayoutError)


def test_mp_073_a_plug_in_of_another_name_is_skipped_with_a_warning(caplog):
    """Its entry point must have the name of its backend; the rest is found all the same."""
    found = discover([Entry("spirit", description("ghost")), entry(description("poltergeist"))])
    assert sorted(found) == ["cpu", "cuda", "poltergeist"]
    assert caplog.messages == ["device plug-in spirit: left out: its backend is named ghost"]
    assert caplog.records[0].levelname == "WARNING"


@pytest.mark.parametrize(
    "loaded", [ImportError("no library"), RuntimeError("no luck"), DeviceDescription, None, "ghost"]
)
def test_plug_ins_that_fail_or_are_something_else_are_left_out(caplog, loaded):
    found = discover([Entry("broken", loaded), entry(description())])
    assert sorted(found) == ["cpu", "cuda", "ghost"]
    (message,) = caplog.messages
    assert message.startswith("device plug-in broken: left out: ")


def test_of_two_of_one_name_the_first_is_used(caplog):
    first, second = description(), description()
    found = discover([entry(first), entry(second), entry(description("cuda", "cuda"))])
    assert found["ghost"] is first
    assert found["cuda"].open.__module__ == devices.__name__
    assert len(caplog.messages) == 2
    assert "there is one of that name" in caplog.text


@pytest.mark.parametrize("name", ["", "CUDA", "cuda-12", "1st", " cuda", "cuda\n", None, "x" * 33])
def test_names_are_lowercase_words(name):
    with pytest.raises(ConfigError, match="device backend: expected"):
        description(backend=name)
    with pytest.raises(ConfigError, match="device type: expected"):
        description(device_type=name)


def test_a_plug_in_shares_and_opens(installed):
    plug_in = PlugIn()
    installed(description(plug_in=plug_in))
    wrapped = wrap_kv_caches({str(n): torch.empty(n, device="meta") for n in (1, 2)})
    assert plug_in.events == ["settled 2", "settled 1"], "when all is complete"
    opened = open_kv_caches(wrapped.descriptors)
    assert [len(one) for one in opened.tensors] == [1, 2]
    opened.close()
    assert plug_in.events[2:] == ["released"] * 2


def test_a_plug_in_is_told_of_the_failure_of_a_batch(installed):
    plug_in = PlugIn()
    installed(description(plug_in=plug_in))
    caches = {str(n): torch.empty(n, device="meta") for n in (1, 2)}
    with pytest.raises(LayoutError, match="dense"):
        wrap_kv_caches({**caches, "bad": torch.zeros(4, 8)[:, :6]})
    assert plug_in.events == ["undone 2", "undone 1"]


def test_the_only_backend_of_a_type_needs_no_choice(installed, monkeypatch):
    installed(description(available=False))
    monkeypatch.setenv(BACKEND_VARIABLE, "whatever")
    assert backend_for("meta").backend_name == "ghost"
    assert backend_for("cpu").backend_name == "cpu"


def test_of_several_the_environment_decides(installed, monkeypatch):
    installed(description("one"), description("two"))
    monkeypatch.setenv(BACKEND_VARIABLE, "two")
    assert backend_for("meta").backend_name == "two"
    monkeypatch.setenv(BACKEND_VARIABLE, "tow")
    with pytest.raises(ConfigError, match="expected one of cuda, cpu, one, two, got 'tow'"):
        backend_for("meta")


def test_of_several_without_a_choice_the_only_available_one(installed, monkeypatch):
    installed(description("one", available=False), description("two"), description("three"))
    with pytest.raises(ConfigError, match=f"set {BACKEND_VARIABLE}"):
        backend_for("meta")
    installed(description("one", available=False), description("two", available=False))
    with pytest.raises(ConfigError, match=r"got \[\] of \['one', 'two'\]"):
        backend_for("meta")
    installed(description("one", available=False), description("two"))
    assert backend_for("meta").backend_name == "two"
    monkeypatch.setenv(BACKEND_VARIABLE, "cuda")
    assert backend_for("meta").backend_name == "two", "a choice for another type"


def test_a_backend_that_is_not_installed_cannot_open():
    share = PluginShare(backend="npu", handle=b"", nbytes=8, offset=0)
    with pytest.raises(ConfigError, match="expected one of cuda, cpu, got 'npu'"):
        open_kv_caches([describe(torch.empty(1), share)])


def test_every_backend_is_engine_driven_unless_asked():
    assert {backend_named(name).default_mode for name in ("cpu", "cuda")} == {"engine_driven"}
    assert backend_named("cpu").is_available()
    assert backend_named("cuda").is_available() == torch.cuda.is_available()


def test_plug_ins_are_looked_for_in_both_groups_and_not_before_they_are_needed(tmp_path):
    """With a package that is really installed, in a process of its own."""
    (tmp_path / "ghost.py").write_text(
        "print('loaded')\n"
        "from lmcache_kernels.transfer.sharing.devices import DeviceDescription\n"
        "new = DeviceDescription('ghost', 'new', lambda: True, None, None)\n"
        "old = DeviceDescription('ghost', 'old', lambda: True, None, None)\n"
    )
    info = tmp_path / "ghost-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ghost\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[lmcache_kernels.device_plugins]\nnew = ghost:new\n"
        "[lmcache.device_plugins]\nold = ghost:old\n"
    )
    script = (
        "import sys\n"
        "from lmcache_kernels.transfer.sharing import devices, wrapping\n"
        "assert 'ghost' not in sys.modules and 'torch' not in sys.modules\n"
        "print(*devices.backends())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.split() == ["loaded", "cuda", "cpu", "new", "old"], done.stderr
