"""GPU memory shared through handles, with a driver that plays several processes in one."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from lmcache_kernels.errors import (
    ConfigError,
    LayoutError,
    LocalProtocolError,
    PeerGone,
    RemoteProtocolError,
)
from lmcache_kernels.transfer.sharing import cuda_driver
from lmcache_kernels.transfer.sharing.cuda_driver import CudaCallFailed
from lmcache_kernels.transfer.sharing.cuda_share import CudaSharing
from lmcache_kernels.transfer.sharing.descriptors import CpuShare, CudaShare, describe

UUIDS = ["00000000-0000-0000-0000-00000000000" + digit for digit in "01"]
MIB = 1 << 20


class FakeGpus:
    """Allocations of all processes: handle to (ordinal, bytes). Host memory stands in for them."""

    def __init__(self):
        self.memory = {}

    def allocate(self, ordinal=0, nbytes=2 * MIB):
        handle = bytes([len(self.memory) + 1]) * 64
        self.memory[handle] = (ordinal, torch.zeros(nbytes, dtype=torch.uint8))
        return handle


class FakeDriver:
    """One process's view: it does not open what it allocated itself, and says what it was asked."""

    def __init__(self, gpus, own=(), uuids=UUIDS):
        self._gpus, self._own, self._uuids = gpus, set(own), uuids
        self.opened, self.asked = [], []

    def ordinals(self):
        self.asked.append("ordinals")
        return {uuid: ordinal for ordinal, uuid in enumerate(self._uuids)}

    def _find(self, address):
        for handle in [*self._own, *self.opened]:
            ordinal, memory = self._gpus.memory.get(handle, (0, torch.empty(0)))
            if 0 <= address - memory.data_ptr() < memory.numel():
                return handle, ordinal, memory
        raise CudaCallFailed("cuMemGetAddressRange_v2: CUDA_ERROR_NOT_FOUND (500)")

    def allocation(self, ordinal, address):
        _, where, memory = self._find(address)
        assert where == ordinal
        return memory.data_ptr(), memory.numel()

    def handle_of(self, ordinal, base):
        handle, _, memory = self._find(base)
        assert base == memory.data_ptr()
        return handle

    def open(self, ordinal, handle):
        self.asked.append("open")
        if handle not in self._gpus.memory or handle in [*self._own, *self.opened]:
            raise CudaCallFailed("cuIpcOpenMemHandle_v2: CUDA_ERROR_INVALID_VALUE (1)")
        self.opened.append(handle)
        return self._gpus.memory[handle][1].data_ptr()

    def close(self, ordinal, address):
        self.opened.remove(self._find(address)[0])

    def bytes_at(self, ordinal, address, nbytes):
        memory = self._find(address)[2] if nbytes else torch.empty(0, dtype=torch.uint8)
        assert not nbytes or memory.data_ptr() == address
        return memory[:nbytes]


def on_gpu(tensor, ordinal=0):
    """A tensor that says it is on a GPU."""
    return SimpleNamespace(
        layout=tensor.layout,
        device=torch.device("cuda", ordinal),
        dtype=tensor.dtype,
        shape=tensor.shape,
        stride=tensor.stride,
        numel=tensor.numel,
        data_ptr=tensor.data_ptr,
    )


def wrap(sharing, tensor, ordinal=0):
    with sharing.wrap(on_gpu(tensor, ordinal)) as descriptor:
        return descriptor


@pytest.fixture
def gpus():
    return FakeGpus()


@pytest.fixture
def handle(gpus):
    return gpus.allocate(ordinal=1)


@pytest.fixture
def memory(gpus, handle):
    return gpus.memory[handle][1]


@pytest.fixture
def owner(gpus, handle):
    return CudaSharing(FakeDriver(gpus, own=[handle]))


@pytest.fixture
def driver(gpus):
    return FakeDriver(gpus)


@pytest.fixture
def reader(driver):
    return CudaSharing(driver)


def test_a_view_is_described_from_the_start_of_its_allocation(owner, memory, handle):
    view = memory[4096:8192].view(torch.float16)[100:500].view(20, 20)[:, :7]
    assert wrap(owner, view, 1) == describe(
        view, CudaShare(handle=handle, device=UUIDS[1], nbytes=2 * MIB, offset=4096 + 200)
    )


def test_an_allocation_is_opened_once_and_closed_with_its_last_tensor(
    owner, memory, handle, reader, driver
):
    views = [memory[:100], memory[64:96].view(torch.int32), memory[512:1024].view(2, 256).t()]
    opened = [reader.open(wrap(owner, view, 1)) for view in (*views, views[0])]
    for one, view in zip(opened, views, strict=False):
        assert one.address == view.data_ptr()
        assert one.to_tensor().stride() == view.stride()
        one.to_tensor().fill_(3)
        assert set(view.flatten().tolist()) == {3}
    assert driver.asked.count("open") == driver.asked.count("ordinals") == 1
    for one in opened:
        assert driver.opened == [handle]
        one.close()
        one.close()
    assert driver.opened == []
    reader.open(wrap(owner, views[0], 1)).close()
    assert driver.asked.count("open") == 2


def test_the_own_process_gets_its_own_memory_without_the_driver(owner, memory):
    descriptor = wrap(owner, memory[8:16], 1)
    one, other = owner.open(descriptor), owner.open(descriptor)
    assert one.address == other.address == memory.data_ptr() + 8
    one.close()
    other.close()
    assert owner._driver.asked == ["ordinals"]


def test_own_memory_that_was_freed_is_not_opened(gpus, owner, memory, handle):
    descriptor = wrap(owner, memory[8:16], 1)
    _, place = gpus.memory.pop(handle)
    with pytest.raises(PeerGone, match="NOT_FOUND"):
        owner.open(descriptor)
    again = bytes(range(64))
    gpus.memory[again] = (1, place)
    owner._driver._own.add(again)
    with pytest.raises(PeerGone, match="other memory is there now"):
        owner.open(descriptor)
    assert wrap(owner, memory[8:16], 1).share.handle == again
    assert list(owner._exported) == [again], "what is gone is forgotten"


def test_a_handle_of_nobody_is_a_typed_error(owner, memory, handle, gpus, reader):
    descriptor = wrap(owner, memory, 1)
    del gpus.memory[handle]
    for _ in range(2):
        with pytest.raises(PeerGone, match=r"has its owner ended\? \(cuIpcOpenMemHandle_v2: CUDA"):
            reader.open(descriptor)
    assert len(reader._opened) == 0


def test_a_gpu_this_process_does_not_see_is_named(owner, memory, gpus):
    descriptor = wrap(owner, memory, 1)
    with pytest.raises(ConfigError, match=f"GPU {UUIDS[1]} is not visible.*sees {UUIDS[0]}; check"):
        CudaSharing(FakeDriver(gpus, uuids=UUIDS[:1])).open(descriptor)
    with pytest.raises(ConfigError, match="sees none"):
        CudaSharing(FakeDriver(gpus, uuids=[])).open(descriptor)


def test_devices_are_found_by_uuid_whatever_their_order(owner, memory, gpus):
    """The other process was given its GPUs in another order; the fake checks the ordinal."""
    descriptor = wrap(owner, memory, 1)
    where = gpus.memory[descriptor.share.handle][1]
    gpus.memory[descriptor.share.handle] = (0, where)
    other = CudaSharing(FakeDriver(gpus, uuids=UUIDS[::-1]))
    assert other.open(descriptor).address == memory.data_ptr()


def test_the_size_that_the_driver_knows_counts(owner, memory, handle, reader, driver):
    """A peer that claims a larger allocation does not get at what lies behind it."""
    claimed = CudaShare(handle=handle, device=UUIDS[1], nbytes=4 * MIB, offset=3 * MIB)
    with pytest.raises(RemoteProtocolError, match=f"expected {4 * MIB} bytes, got {2 * MIB}"):
        reader.open(describe(memory[:10], claimed))
    assert driver.opened == []


def test_what_fails_after_opening_closes_again(owner, memory, reader, driver, monkeypatch):
    def fails(*_):
        raise CudaCallFailed("later")

    monkeypatch.setattr(driver, "bytes_at", fails)
    with pytest.raises(CudaCallFailed, match="later"):
        reader.open(wrap(owner, memory, 1))
    assert driver.opened == []


def test_memory_that_cannot_be_exported_is_explained(owner, memory, monkeypatch):
    def refuses(*_):
        raise CudaCallFailed("cuIpcGetMemHandle: CUDA_ERROR_INVALID_VALUE (1)")

    monkeypatch.setattr(owner._driver, "handle_of", refuses)
    with pytest.raises(ConfigError, match=r"expandable segments.*engine_driven"):
        wrap(owner, memory, 1)


def test_empty_tensors_have_no_handle(owner, reader, driver):
    descriptor = wrap(owner, torch.empty(3, 0), 1)
    assert descriptor.share == CudaShare(handle=b"", device=UUIDS[1], nbytes=0, offset=0)
    opened = reader.open(descriptor)
    assert list(opened.to_tensor().shape) == [3, 0]
    opened.close()
    assert "open" not in driver.asked


def test_only_strided_tensors_and_cuda_shares(owner, memory, reader):
    with pytest.raises(LayoutError, match="strided"):
        wrap(owner, torch.zeros(3, 3).to_sparse(), 1)
    with pytest.raises(LocalProtocolError, match="CpuShare"):
        reader.open(describe(memory, CpuShare(segment="s", nbytes=2 * MIB, offset=0)))


# --- the real driver's bindings, where there is no GPU ---------------------------------------------

STUB = r"""
#include <string.h>
typedef struct { unsigned char reserved[64]; } Handle;
static int depth, retained;
static unsigned char seen[64];
int cuInit(unsigned flags) { return flags; }
int cuGetErrorName(int code, const char **text) { *text = code == 400 ? "CUDA_ERROR_INVALID_HANDLE" : 0; return 0; }
int cuDeviceGetCount(int *count) { *count = 2; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal + 10; return 0; }
int cuDeviceGetUuid_v2(char *uuid, int device) { memset(uuid, 0, 16); uuid[15] = (char)device; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { retained++; *context = (void *)(long)(device + 0x700000000000); return 0; }
int cuCtxPushCurrent_v2(void *context) { depth++; return (long)context < 0x700000000000; }
int cuCtxPopCurrent_v2(void **context) { *context = 0; depth--; return 0; }
int cuMemGetAddressRange_v2(unsigned long long *base, size_t *size, unsigned long long address) {
    *base = address & ~0xfffffULL; *size = 1UL << 40; return depth == 1 ? 0 : 201; }
int cuIpcGetMemHandle(Handle *handle, unsigned long long base) {
    if (!base) return 1;
    memset(handle, 0, 64); memcpy(handle->reserved, &base, 8); handle->reserved[63] = 9; return depth == 1 ? 0 : 201; }
int cuIpcOpenMemHandle_v2(unsigned long long *address, Handle handle, unsigned flags) {
    if (handle.reserved[63] != 9) return 400;
    memcpy(seen, &handle, 64); memcpy(address, handle.reserved, 8); *address += flags; return depth == 1 ? 0 : 201; }
int cuIpcCloseMemHandle(unsigned long long address) { return depth == 1 && address == 0x7fff12300001ULL && retained == 1 ? 0 : 1; }
"""

CALLS = """
from lmcache_kernels.transfer.sharing import cuda_driver
from lmcache_kernels.transfer.sharing.cuda_driver import CudaCallFailed, CudaDriver
driver = CudaDriver()
name = "00000000-0000-0000-0000-0000000000"
assert driver.ordinals() == {name + "0a": 0, name + "0b": 1}, driver.ordinals()
assert driver.allocation(1, 0x7FFF12345678) == (0x7FFF12300000, 1 << 40)
handle = driver.handle_of(1, 0x7FFF12300000)
assert len(handle) == 64 and handle[63] == 9
assert driver.open(1, handle) == 0x7FFF12300001
driver.close(1, 0x7FFF12300001)
for failing, text in (
    (lambda: driver.open(1, bytes(64)), "cuIpcOpenMemHandle_v2: CUDA_ERROR_INVALID_HANDLE (400)"),
    (lambda: driver.handle_of(1, 0), "cuIpcGetMemHandle: error (1)"),
):
    try:
        failing()
    except CudaCallFailed as error:
        assert str(error) == text, error
    else:
        raise AssertionError(text)
assert driver.allocation(1, 1 << 40) == (1 << 40, 1 << 40), "errors leave no context behind"
"""


def test_the_drivers_functions_are_called_as_they_are_declared(tmp_path):
    """A library with their C signatures: 64 bytes by value, addresses above 4 GiB, a context for each call."""
    source, library = tmp_path / "cuda.c", tmp_path / "libcuda.so.1"
    source.write_text(STUB)
    try:
        subprocess.run(
            ["cc", "-shared", "-fPIC", "-w", "-o", library, source], check=True, timeout=60
        )
    except FileNotFoundError:
        pytest.skip("no C compiler")
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", CALLS],
        env={"LD_LIBRARY_PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


def test_without_a_driver_a_descriptor_is_refused(monkeypatch):
    def missing(name):
        raise OSError(f"{name}: not there")

    monkeypatch.setattr(cuda_driver.ctypes, "CDLL", missing)
    with pytest.raises(
        ConfigError, match=r"CUDA driver: cannot be used: libcuda\.so\.1: not there"
    ):
        cuda_driver.CudaDriver()
