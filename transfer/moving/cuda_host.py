"""CUDA's own functions that torch does not offer, or only at a price: host memory, queueing."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import TYPE_CHECKING

import torch

from lmcache_kernels.cuda_runtime import cuda_runtime

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_CAPTURE_MODE_RELAXED = 2  # cudaStreamCaptureModeRelaxed
_CAN_USE_HOST_POINTER = 91  # cudaDevAttrCanUseHostPointerForRegisteredMem


class CudaHostMemory:
    """The :class:`~lmcache_kernels.transfer.memory.pinning.HostRegistry` of this process.

    One registration serves all GPUs. It is made by one that the process uses already: on another
    one it would cost the half GB of device memory that a CUDA context takes.
    """

    def __init__(self) -> None:
        self._runtime = host_runtime()
        self._device = _device_in_use()

    def register(self, address: int, nbytes: int) -> int:
        # A thread may else not register while another one captures a graph, and spoils that graph.
        mode = ctypes.c_int(_CAPTURE_MODE_RELAXED)
        self._runtime.cudaThreadExchangeStreamCaptureMode(ctypes.byref(mode))
        try:
            with torch.cuda.device(self._device):
                return int(self._runtime.cudaHostRegister(address, nbytes, 0))
        finally:
            self._runtime.cudaThreadExchangeStreamCaptureMode(ctypes.byref(mode))

    def unregister(self, address: int) -> int:
        with torch.cuda.device(self._device):
            return int(self._runtime.cudaHostUnregister(address))

    def forget_error(self) -> None:
        self._runtime.cudaGetLastError()

    def same_addresses(self) -> bool:
        value = ctypes.c_int()
        code = self._runtime.cudaDeviceGetAttribute(
            ctypes.byref(value), _CAN_USE_HOST_POINTER, self._device
        )
        return code == 0 and value.value == 1

    def device_address(self, address: int) -> int:
        found = ctypes.c_void_p()
        with torch.cuda.device(self._device):
            code = self._runtime.cudaHostGetDevicePointer(ctypes.byref(found), address, 0)
        if code:
            self.forget_error()
        return found.value or 0


@cache
def host_runtime() -> ctypes.CDLL:
    """The CUDA runtime, told what the functions for host memory and streams take."""
    runtime = cuda_runtime()
    address, size, flags = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint
    out = ctypes.POINTER(ctypes.c_void_p)
    runtime.cudaHostRegister.argtypes = [address, size, flags]
    runtime.cudaHostUnregister.argtypes = [address]
    runtime.cudaHostGetDevicePointer.argtypes = [out, address, flags]
    runtime.cudaHostAlloc.argtypes = [out, size, flags]
    runtime.cudaFreeHost.argtypes = [address]
    runtime.cudaStreamCreateWithPriority.argtypes = [out, flags, ctypes.c_int]
    return runtime


def pci_address(device: int) -> str:
    """Of a GPU, such as ``0000:3b:00.0``; "" if CUDA does not say."""
    text = ctypes.create_string_buffer(32)
    code = host_runtime().cudaDeviceGetPCIBusId(text, len(text), device)
    return "" if code else text.value.decode().lower()


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _BatchAttributes(ctypes.Structure):
    """cudaMemcpyAttributes; the hints matter for managed memory only."""

    _fields_ = (
        ("source_order", ctypes.c_int),
        ("source_hint", _Location),
        ("destination_hint", _Location),
        ("flags", ctypes.c_uint),
    )


_SOURCE_IN_STREAM_ORDER = 1  # cudaMemcpySrcAccessOrderStream


def has_batched_copies() -> bool:
    """Whether :func:`copy_batch` works: before CUDA 13 the call had other arguments."""
    return str(torch.version.cuda).startswith("13.") and hasattr(
        host_runtime(), "cudaMemcpyBatchAsync"
    )


def copy_batch(
    to: NDArray[np.uint64], origin: NDArray[np.uint64], sizes: NDArray[np.uint64], stream: int
) -> int:
    """Queue copies between addresses with one ``cudaMemcpyBatchAsync``; CUDA's code.

    Args:
        to, origin, sizes: dense and of one length. Copies have no order among themselves.
        stream: not the default one.
    """
    attributes, first = _BatchAttributes(source_order=_SOURCE_IN_STREAM_ORDER), ctypes.c_size_t(0)
    return int(
        host_runtime().cudaMemcpyBatchAsync(
            ctypes.c_void_p(to.ctypes.data),
            ctypes.c_void_p(origin.ctypes.data),
            ctypes.c_void_p(sizes.ctypes.data),
            ctypes.c_size_t(len(to)),
            ctypes.byref(attributes),
            ctypes.byref(first),
            ctypes.c_size_t(1),
            ctypes.c_void_p(stream),
        )
    )


def _device_in_use() -> int:
    driver = ctypes.CDLL("libcuda.so.1")
    flags, active = ctypes.c_uint(), ctypes.c_int()
    for device in range(torch.cuda.device_count()):
        code = driver.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active))
        if code == 0 and active.value:
            return device
    return int(torch.cuda.current_device())
