"""Which node is near a device, on made-up machines; and that asking for it harms nothing here."""

from __future__ import annotations

import ctypes
import mmap

import pytest

from lmcache_kernels.errors import ConfigError
from lmcache_kernels.transfer.memory import numa


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Makes a machine of so many nodes whose devices are on the nodes given."""

    def make(count: int, devices: dict[str, str]) -> None:
        nodes, pci = tmp_path / "nodes", tmp_path / "pci"
        nodes.mkdir()
        for node in range(count):
            (nodes / f"node{node}").mkdir()
        (nodes / "online").write_text(f"0-{count - 1}\n")
        for address, node in devices.items():
            (pci / address).mkdir(parents=True)
            (pci / address / "numa_node").write_text(node)
        monkeypatch.setattr(numa, "NODES", nodes)
        monkeypatch.setattr(numa, "PCI_DEVICES", pci)

    return make


@pytest.mark.parametrize("spelt", ["0000:3b:00.0", "00000000:3B:00.0", "3b:00.0", "0000:3B:00.0"])
def test_a_device_is_found_however_its_address_is_spelt(machine, spelt: str) -> None:
    machine(2, {"0000:3b:00.0": "1\n", "0001:3b:00.0": "0\n"})
    assert numa.node_of(spelt) == 1
    assert numa.node_of("00000001:3B:00.0") == 0


@pytest.mark.parametrize(
    ("count", "node"), [(2, "-1\n"), (1, "0\n"), (2, "7\n"), (2, "\n"), (0, "0\n")]
)
def test_where_it_makes_no_difference_there_is_no_node(machine, count: int, node: str) -> None:
    """Not known, the only one, not there, nonsense, or a kernel without nodes."""
    machine(count, {"0000:3b:00.0": node})
    assert numa.node_of("0000:3b:00.0") is None


def test_an_unknown_device_has_no_node(machine) -> None:
    machine(2, {})
    assert numa.node_of("0000:3b:00.0") is None


@pytest.mark.parametrize("address", ["", "GPU-1", "../3b:00.0", "0000:3b:00.9", "x" * 1000])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="PCI address"):
        numa.node_of(address)


def test_nodes_are_checked(machine) -> None:
    machine(2, {})
    numa.check_node(1)
    for node in (-1, 2):
        with pytest.raises(ConfigError, match=rf"expected one of \[0, 1\], got {node}"):
            numa.check_node(node)


def test_a_machine_of_one_node_asks_the_kernel_nothing(machine, monkeypatch) -> None:
    machine(1, {})
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: pytest.fail("asked"))
    numa.prefer_node(0, 4096, 0)


def test_the_kernel_is_told(machine, monkeypatch, caplog) -> None:
    """The real call on real memory; node 0 exists everywhere. Containers may refuse it."""
    machine(2, {})
    memory = mmap.mmap(-1, 4 * mmap.PAGESIZE)
    anchor = ctypes.c_char.from_buffer(memory)
    numa.prefer_node(ctypes.addressof(anchor), len(memory), 0)
    if not caplog.records:
        assert "prefer" in policy_at(ctypes.addressof(anchor))
    memory[:1] = b"x"
    del anchor
    memory.close()


def policy_at(address: int) -> str:
    try:
        with open("/proc/self/numa_maps") as lines:
            return next((line for line in lines if line.startswith(f"{address:x} ")), "")
    except FileNotFoundError:
        pytest.skip("this kernel shows no policies")


def test_a_refusal_is_a_warning(machine, caplog) -> None:
    machine(2, {})
    numa.prefer_node(1, 4096, 0)  # no page begins there
    (record,) = caplog.records
    assert "no NUMA placement on node 0" in record.getMessage()


def test_an_unknown_processor_is_a_warning(machine, monkeypatch, caplog) -> None:
    machine(2, {})
    monkeypatch.setattr(numa.platform, "machine", lambda: "vax")
    numa.prefer_node(0, 4096, 0)
    assert "vax" in caplog.text
