"""What crosses when a process shares tensors: numbers and names, checked before anything is opened.

A descriptor says which allocation of its owner a tensor lies in (its *share*) and which of the
allocation's bytes are the tensor's. Pure: no torch, no I/O; decoding opens nothing.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

import msgspec

from lmcache_kernels.errors import LayoutError, RemoteProtocolError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

VERSION: Final = 1
"""Raised by one whenever descriptors change. Both sides must speak the same."""

DTYPES = {
    "uint8": 1,
    "int8": 1,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "int16": 2,
    "float16": 2,
    "bfloat16": 2,
    "int32": 4,
    "float32": 4,
    "int64": 8,
    "float64": 8,
}
"""Element types that can be shared, as torch names them, and their bytes."""

CUDA_HANDLE_BYTES = 64
"""CU_IPC_HANDLE_SIZE; of memory and of events."""

MAX_BYTES = 1 << 48
"""Of an allocation; more than the addresses a process has on x86-64 and Arm."""

MAX_DIMS = 16
MAX_TENSORS = 1 << 12
"""In one message; engines have one or a few for each layer."""

MAX_MESSAGE = 1 << 22
MAX_PLUGIN_HANDLE = 1 << 12

_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_SEGMENT = re.compile(r"\w{1,64}", re.ASCII)
BACKEND_NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")


class Share(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="on"):
    """An allocation of the owner, and where in it the tensor's first element is. All in bytes.

    An empty tensor refers to none: ``nbytes`` is 0 and the allocation has no name.
    """

    nbytes: int
    offset: int

    def __post_init__(self) -> None:
        if not 0 <= self.offset <= self.nbytes <= MAX_BYTES:
            raise LayoutError(
                f"share: expected 0 <= offset <= nbytes <= {MAX_BYTES}, "
                f"got offset {self.offset} nbytes {self.nbytes}"
            )


class CpuShare(Share, frozen=True, kw_only=True, tag="cpu"):
    """Host memory: the segment of that name in /dev/shm, whose size is ``nbytes``."""

    segment: str

    def __post_init__(self) -> None:
        super().__post_init__()
        if not _SEGMENT.fullmatch(self.segment) if self.nbytes else self.segment:
            raise LayoutError(
                f"share.segment: expected {_SEGMENT.pattern if self.nbytes else 'no name'}, "
                f"got {self.segment[:80]!r}"
            )


class CudaShare(Share, frozen=True, kw_only=True, tag="cuda"):
    """GPU memory: the driver's handle of the allocation and the UUID of the GPU it is on."""

    handle: bytes
    device: str

    def __post_init__(self) -> None:
        super().__post_init__()
        expected = CUDA_HANDLE_BYTES if self.nbytes else 0
        if len(self.handle) != expected:
            raise LayoutError(
                f"share.handle: expected {expected} bytes for an allocation of {self.nbytes}, "
                f"got {len(self.handle)}"
            )
        if not _UUID.fullmatch(self.device):
            raise LayoutError(f"share.device: expected a UUID, got {self.device[:80]!r}")


class PluginShare(Share, frozen=True, kw_only=True, tag="plugin"):
    """Memory of another device: a handle that the plug-in named ``backend`` understands."""

    backend: str
    handle: bytes

    def __post_init__(self) -> None:
        super().__post_init__()
        if not BACKEND_NAME.fullmatch(self.backend):
            raise LayoutError(
                f"share.backend: expected {BACKEND_NAME.pattern}, got {self.backend[:80]!r}"
            )
        if len(self.handle) > MAX_PLUGIN_HANDLE:
            raise LayoutError(
                f"share.handle: expected <= {MAX_PLUGIN_HANDLE} bytes, got {len(self.handle)}"
            )


AnyShare: TypeAlias = CpuShare | CudaShare | PluginShare


class TensorDescriptor(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tensor inside an allocation of its owner.

    Attributes:
        version: first on the wire, so that another version is refused as such.
        share: the allocation, and the offset of element 0 in it.
        dtype: one of :data:`DTYPES`.
        shape, strides: in elements.

    Raises:
        LayoutError: what cannot be a view of the allocation.
    """

    version: Literal[1]
    share: AnyShare
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise LayoutError(f"dtype: expected one of {', '.join(DTYPES)}, got {self.dtype[:80]}")
        if len(self.shape) != len(self.strides) or len(self.shape) > MAX_DIMS:
            raise LayoutError(
                f"shape: expected as many extents as strides and at most {MAX_DIMS}, "
                f"got {len(self.shape)} and {len(self.strides)}"
            )
        if any(not 0 <= number <= MAX_BYTES for number in (*self.shape, *self.strides)):
            raise LayoutError(
                f"shape: expected extents and strides from 0 to {MAX_BYTES}, got {self.where}"
            )
        if self.share.offset % self.itemsize:
            raise LayoutError(
                f"share.offset: expected a multiple of {self.itemsize} for {self.dtype}, "
                f"got {self.share.offset}"
            )
        # Strides of 0 repeat elements: such views are small in memory and could still be endless.
        if math.prod(self.shape) * self.itemsize > MAX_BYTES:
            raise LayoutError(f"shape: expected at most {MAX_BYTES} bytes, got {self.where}")
        if self.share.offset + self.span > self.share.nbytes:
            raise LayoutError(
                f"view: expected inside an allocation of {self.share.nbytes} bytes, got "
                f"{self.span} bytes at {self.share.offset} of {self.where}"
            )

    @property
    def backend(self) -> str:
        """Name of the device backend that can open it."""
        if isinstance(self.share, PluginShare):
            return self.share.backend
        return "cpu" if isinstance(self.share, CpuShare) else "cuda"

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype]

    @property
    def span(self) -> int:
        """Bytes from the first to behind the last element."""
        if 0 in self.shape:
            return 0
        last = sum((n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True))
        return (last + 1) * self.itemsize

    @property
    def where(self) -> str:
        return f"shape {self.shape} strides {self.strides} {self.dtype}"


def describe(tensor: torch.Tensor, share: AnyShare) -> TensorDescriptor:
    """The descriptor of a strided tensor that lies in ``share``.

    Raises:
        LayoutError: a dtype that cannot be shared, or a tensor that is not inside the share.
    """
    return TensorDescriptor(
        version=VERSION,
        share=share,
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=tuple(tensor.shape),
        strides=tensor.stride(),
    )


def encode(descriptors: Sequence[TensorDescriptor]) -> bytes:
    """The descriptors as MessagePack, for :func:`decode`.

    Raises:
        LayoutError: more than :data:`MAX_TENSORS`.
    """
    if len(descriptors) > MAX_TENSORS:
        raise LayoutError(f"expected at most {MAX_TENSORS} tensors, got {len(descriptors)}")
    return msgspec.msgpack.encode(list(descriptors))


def decode(data: bytes) -> tuple[TensorDescriptor, ...]:
    """The descriptors in ``data``. Nothing is opened, and no value is believed unchecked.

    Raises:
        RemoteProtocolError: bytes that are no descriptors of this :data:`VERSION`, an unknown
            field, or a view that is not inside its allocation.
    """
    if len(data) > MAX_MESSAGE:
        raise RemoteProtocolError(
            f"tensor descriptors: expected <= {MAX_MESSAGE} bytes, got {len(data)}"
        )
    try:
        found = msgspec.msgpack.decode(data, type=tuple[TensorDescriptor, ...])
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise RemoteProtocolError(f"tensor descriptors of version {VERSION}: {error}") from error
    if len(found) > MAX_TENSORS:
        raise RemoteProtocolError(
            f"tensor descriptors: expected at most {MAX_TENSORS}, got {len(found)}"
        )
    return found
