"""Which kinds of device memory can be shared: CUDA, the CPU, and what installed plug-ins add.

A plug-in is an entry point in the group ``lmcache_kernels.device_plugins`` (``lmcache.device_plugins``,
which existing device plug-ins use, is read as well). It names a :class:`DeviceDescription`, and the
entry point's own name is the description's ``backend_name``. A plug-in that cannot be used is warned
about and left out. They are looked for when a tensor is first wrapped or opened.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from lmcache_kernels.errors import ConfigError, LayoutError

from .descriptors import BACKEND_NAME

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from contextlib import AbstractContextManager
    from importlib.metadata import EntryPoint

    import torch

    from .cuda_share import CudaSharing
    from .descriptors import TensorDescriptor
    from .opening import Opened

logger = logging.getLogger(__name__)

PLUGIN_GROUPS = ("lmcache_kernels.device_plugins", "lmcache.device_plugins")
BACKEND_VARIABLE = "LMCACHE_DEVICE_BACKEND"
"""Environment variable that names the backend to use where a device type has several."""


@dataclass(frozen=True)
class DeviceDescription:
    """How one backend shares tensors.

    Attributes:
        device_type: as in ``torch.device.type``.
        backend_name: unlike that of any other backend.
        is_available: whether this machine has such a device.
        wrap: describes a tensor. The context it returns is left when the batch is complete, or with
            the exception that ended it: then what was made for this tensor is to be undone.
        open: the tensor behind a descriptor that ``wrap`` of the same backend made elsewhere.
        default_mode: the transfer mode that ``auto`` means.

    Raises:
        ConfigError: a name that is empty, or not lowercase letters, digits and underscores.
    """

    device_type: str
    backend_name: str
    is_available: Callable[[], bool]
    wrap: Callable[[torch.Tensor], AbstractContextManager[TensorDescriptor]]
    open: Callable[[TensorDescriptor], Opened]
    default_mode: str = "engine_driven"

    def __post_init__(self) -> None:
        for what, name in (("type", self.device_type), ("backend", self.backend_name)):
            if not isinstance(name, str) or not BACKEND_NAME.fullmatch(name):
                raise ConfigError(f"device {what}: expected {BACKEND_NAME.pattern}, got {name!r}")


def backend_for(device_type: str) -> DeviceDescription:
    """The backend that shares tensors of ``device_type``.

    Raises:
        LayoutError: none does.
        ConfigError: several do, and which one to use is not clear.
    """
    able = [found for found in backends().values() if found.device_type == device_type]
    if not able:
        known = sorted({found.device_type for found in backends().values()})
        raise LayoutError(f"device type: expected one of {', '.join(known)}, got {device_type!r}")
    if len(able) == 1:
        return able[0]
    asked = os.environ.get(BACKEND_VARIABLE)
    if asked and asked not in backends():
        raise ConfigError(
            f"{BACKEND_VARIABLE}: expected one of {', '.join(backends())}, got {asked!r}"
        )
    for found in able:
        if found.backend_name == asked:
            return found
    available = [found for found in able if found.is_available()]
    if len(available) != 1:
        raise ConfigError(
            f"device type {device_type}: expected one available backend, got "
            f"{[found.backend_name for found in available]} of "
            f"{[found.backend_name for found in able]}; set {BACKEND_VARIABLE}"
        )
    return available[0]


def backend_named(name: str) -> DeviceDescription:
    """The backend of that name.

    Raises:
        ConfigError: it is not installed here.
    """
    found = backends().get(name)
    if found is None:
        raise ConfigError(f"device backend: expected one of {', '.join(backends())}, got {name!r}")
    return found


@cache
def backends() -> dict[str, DeviceDescription]:
    """Every usable backend by name: the built-in ones, then the plug-ins'."""
    return discover(entry for group in PLUGIN_GROUPS for entry in entry_points(group=group))


def discover(plug_ins: Iterable[EntryPoint]) -> dict[str, DeviceDescription]:
    """The built-in backends, and of ``plug_ins`` those that can be used."""
    found = {description.backend_name: description for description in _built_in()}
    for entry in plug_ins:
        try:
            description = entry.load()
        except Exception as error:
            logger.warning("device plug-in %s: left out: %s", entry.name, error, exc_info=True)
            continue
        if not isinstance(description, DeviceDescription):
            logger.warning(
                "device plug-in %s: left out: expected a DeviceDescription, got %r",
                entry.name,
                description,
            )
        elif description.backend_name != entry.name:
            logger.warning(
                "device plug-in %s: left out: its backend is named %s",
                entry.name,
                description.backend_name,
            )
        elif entry.name in found:
            logger.warning("device plug-in %s: left out: there is one of that name", entry.name)
        else:
            found[entry.name] = description
    return found


def _built_in() -> list[DeviceDescription]:
    import torch

    from .cpu_share import CpuSharing

    cpu = CpuSharing()
    return [
        DeviceDescription(
            device_type="cuda",
            backend_name="cuda",
            is_available=torch.cuda.is_available,
            wrap=lambda tensor: _cuda().wrap(tensor),
            open=lambda descriptor: _cuda().open(descriptor),
        ),
        DeviceDescription(
            device_type="cpu",
            backend_name="cpu",
            is_available=lambda: True,
            wrap=cpu.wrap,
            open=cpu.open,
        ),
    ]


@cache
def _cuda() -> CudaSharing:
    from .cuda_driver import CudaDriver
    from .cuda_share import CudaSharing

    return CudaSharing(CudaDriver())
