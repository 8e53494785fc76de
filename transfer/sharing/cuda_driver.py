"""The few calls of the CUDA driver that sharing GPU memory between processes takes.

They go to libcuda itself: torch does not offer them for memory that is already allocated, and an
error of the driver leaves nothing behind in the runtime that torch uses.
"""

from __future__ import annotations

import ctypes
import threading
import uuid
from contextlib import contextmanager
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import TYPE_CHECKING, Any

from lmcache_kernels.errors import ConfigError, KVTransferError

from .descriptors import CUDA_HANDLE_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

_ENABLE_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, the one flag there is


class CudaCallFailed(KVTransferError):
    """A call of the CUDA driver failed; the message has its name and the driver's for the error."""


class _MemoryHandle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * CUDA_HANDLE_BYTES),)


_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuDeviceGetCount": (POINTER(c_int),),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetUuid_v2": (c_char_p, c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (POINTER(c_void_p),),
    "cuMemGetAddressRange_v2": (POINTER(c_uint64), POINTER(c_size_t), c_uint64),
    "cuIpcGetMemHandle": (POINTER(_MemoryHandle), c_uint64),
    "cuIpcOpenMemHandle_v2": (POINTER(c_uint64), _MemoryHandle, c_uint),
    "cuIpcCloseMemHandle": (c_uint64,),
}


class CudaDriver:
    """libcuda. Devices are ordinals as torch counts them. Safe for threads.

    Every method raises CudaCallFailed when the driver does not do what it is asked.

    Raises:
        ConfigError: there is no CUDA driver here.
    """

    def __init__(self) -> None:
        try:
            library = ctypes.CDLL("libcuda.so.1")
            self._functions = {name: getattr(library, name) for name in _SIGNATURES}
        except (OSError, AttributeError) as error:
            raise ConfigError(f"CUDA driver: cannot be used: {error}") from error
        for name, types in _SIGNATURES.items():
            self._functions[name].argtypes = types
        self._lock = threading.Lock()
        self._contexts: dict[int, c_void_p] = {}
        self._call("cuInit", 0)

    def ordinals(self) -> dict[str, int]:
        """The devices of this process by their UUID."""
        count = c_int()
        self._call("cuDeviceGetCount", byref(count))
        found = {}
        for ordinal in range(count.value):
            name = ctypes.create_string_buffer(16)
            self._call("cuDeviceGetUuid_v2", name, self._device(ordinal))
            found[str(uuid.UUID(bytes=name.raw))] = ordinal
        return found

    def allocation(self, ordinal: int, address: int) -> tuple[int, int]:
        """Address and bytes of the allocation that ``address`` lies in."""
        base, nbytes = c_uint64(), c_size_t()
        with self._context(ordinal):
            self._call("cuMemGetAddressRange_v2", byref(base), byref(nbytes), address)
        return base.value, nbytes.value

    def handle_of(self, ordinal: int, base: int) -> bytes:
        """What another process can open the allocation at ``base`` with: always the same bytes."""
        handle = _MemoryHandle()
        with self._context(ordinal):
            self._call("cuIpcGetMemHandle", byref(handle), base)
        return bytes(handle)

    def open(self, ordinal: int, handle: bytes) -> int:
        """Map another process's allocation; where it is here."""
        address = c_uint64()
        with self._context(ordinal):
            self._call(
                "cuIpcOpenMemHandle_v2",
                byref(address),
                _MemoryHandle.from_buffer_copy(handle),
                _ENABLE_PEER_ACCESS,
            )
        return address.value

    def close(self, ordinal: int, address: int) -> None:
        """Unmap what :meth:`open` mapped."""
        with self._context(ordinal):
            self._call("cuIpcCloseMemHandle", address)

    def bytes_at(self, ordinal: int, address: int, nbytes: int) -> torch.Tensor:
        """Memory of a device as a tensor of uint8, which does not own it."""
        import torch

        torch.cuda.init()
        device = f"cuda:{ordinal}"
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8, device=device)
        return torch.as_tensor(_Bytes(address, nbytes), device=device)

    def _device(self, ordinal: int) -> int:
        device = c_int()
        self._call("cuDeviceGet", byref(device), ordinal)
        return device.value

    @contextmanager
    def _context(self, ordinal: int) -> Iterator[None]:
        """The context that torch uses, current for the calling thread, whatever was before."""
        with self._lock:
            context = self._contexts.get(ordinal)
            if context is None:
                context = c_void_p()
                self._call("cuDevicePrimaryCtxRetain", byref(context), self._device(ordinal))
                self._contexts[ordinal] = context
        self._call("cuCtxPushCurrent_v2", context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", byref(c_void_p()))

    def _call(self, name: str, *arguments: Any) -> None:
        code = self._functions[name](*arguments)
        if code:
            text = c_char_p()
            self._functions["cuGetErrorName"](code, byref(text))
            raise CudaCallFailed(f"{name}: {(text.value or b'error').decode()} ({code})")


class _Bytes:
    """What torch makes a tensor of that lies on memory it did not allocate."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
        }
