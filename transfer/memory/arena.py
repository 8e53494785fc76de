"""One region of host memory that several processes map: a file in /dev/shm. Linux only.

Its owner holds an exclusive ``flock`` on the file as long as it lives. The kernel drops the lock
with the process however that ends, so a segment whose lock is free belongs to nobody: no process
ids are compared, and a reused one cannot be mistaken. Pages are allocated for real before the first
use, so that a /dev/shm that is too small is an error here and never a SIGBUS later. They are of 2 MB
where the file system allows it (``huge=advise``).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import mmap
import os
import re
import secrets
import stat
import weakref
from pathlib import Path

from lmcache_kernels.errors import (
    CapacityError,
    Closed,
    ConfigError,
    LayoutError,
    PeerGone,
    RemoteProtocolError,
)

from .first_touch import NO_ROOM, allocate_pages
from .memory_room import check_room, no_room
from .numa import check_node, prefer_node

logger = logging.getLogger(__name__)

SHM_DIRECTORY = Path("/dev/shm")
NAME_PATTERN = re.compile(r"lmcache_kernels_[0-9a-f]{32}")

_CREATE_ATTEMPTS = 16  # each lost only if a sweeper strikes between two adjacent system calls


class Arena:
    """A mapped region; made by :meth:`create` or :meth:`attach`.

    Attributes:
        name: of the file in its directory.
        nbytes: size.
        address: where the region begins in this process.
    """

    def __init__(self, path: Path, nbytes: int, descriptor: int, *, owner: bool) -> None:
        """Takes over ``descriptor``."""
        self.name = path.name
        self.nbytes = nbytes
        try:
            self._memory: mmap.mmap | None = mmap.mmap(descriptor, nbytes)
        except OSError as error:
            raise CapacityError(f"arena {path.name}: cannot map {nbytes} bytes: {error}") from error
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        # Runs once: by close, by the garbage collector or, for an owner, when the interpreter exits.
        self._let_go = weakref.finalize(
            self, _let_go, self._memory, descriptor, path if owner else None, os.getpid()
        )
        self._let_go.atexit = owner

    @classmethod
    def create(
        cls, nbytes: int, directory: Path = SHM_DIRECTORY, *, numa_node: int | None = None
    ) -> Arena:
        """A new region, zeroed and owned by this process; stale ones are swept first.

        Takes about a second for 5 GB, see :mod:`.first_touch`.

        Args:
            numa_node: where the memory comes from as long as there is some, best the GPU's
                (:func:`.memory.numa.node_of`).

        Raises:
            ConfigError: a size below 1, a node that is not there, or a directory that cannot be
                used.
            CapacityError: not so much room; nothing is left behind.
        """
        if nbytes < 1:
            raise ConfigError(f"arena size: expected >= 1 byte, got {nbytes}")
        if numa_node is not None:
            check_node(numa_node)
        try:
            sweep_stale_segments(directory)
            check_room(nbytes, directory)
            path, descriptor = _create_locked(directory)
            try:
                os.truncate(descriptor, nbytes)
                arena = cls(path, nbytes, descriptor, owner=True)
            except BaseException:
                path.unlink(missing_ok=True)
                os.close(descriptor)
                raise
            try:
                if numa_node is not None:
                    prefer_node(arena.address, nbytes, numa_node)
                allocate_pages(arena.address, nbytes, descriptor)
            except BaseException as error:
                arena.close()  # first: what it had taken counts as free again
                if isinstance(error, OSError) and error.errno in NO_ROOM:
                    raise no_room(nbytes, directory) from error
                raise
            return arena
        except OSError as error:
            raise ConfigError(f"arena directory {directory}: cannot be used: {error}") from error

    @classmethod
    def attach(cls, name: str, nbytes: int, directory: Path = SHM_DIRECTORY) -> Arena:
        """Map, for reading and writing, the region another process owns.

        Raises:
            PeerGone: no such region: its owner has ended.
            RemoteProtocolError: a name, file type, user or size that the region cannot have.
            CapacityError: it cannot be mapped.
        """
        if not NAME_PATTERN.fullmatch(name):
            raise RemoteProtocolError(
                f"arena name: expected {NAME_PATTERN.pattern}, got {name[:80]!r}"
            )
        if nbytes < 1:
            raise RemoteProtocolError(f"arena size: expected >= 1 byte, got {nbytes}")
        path = directory / name
        try:
            descriptor = _open(path, os.O_RDWR)
        except FileNotFoundError as error:
            raise PeerGone(f"arena {path}: not there; has the server ended?") from error
        except OSError as error:
            raise RemoteProtocolError(f"arena {path}: cannot be opened: {error}") from error
        try:
            status = os.fstat(descriptor)
            for what, expected, got in (
                ("regular file", True, stat.S_ISREG(status.st_mode)),
                ("user id", os.geteuid(), status.st_uid),
                ("bytes", nbytes, status.st_size),
            ):
                if expected != got:
                    raise RemoteProtocolError(
                        f"arena {path}, {what}: expected {expected}, got {got}"
                    )
            return cls(path, nbytes, descriptor, owner=False)
        except BaseException:
            os.close(descriptor)
            raise

    def view(self, offset: int, nbytes: int) -> memoryview:
        """The bytes [offset, offset + nbytes), writable.

        Raises:
            LayoutError: a range that is not inside the region.
            Closed: after :meth:`close`.
        """
        if self._memory is None:
            raise Closed(f"arena {self.name} is closed")
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise LayoutError(
                f"arena {self.name}: expected a range inside its {self.nbytes} bytes, got "
                f"{nbytes} at {offset}"
            )
        return memoryview(self._memory)[offset : offset + nbytes]

    def close(self) -> None:
        """Unmap; the owner also removes the file. Idempotent.

        While somebody still has a view the mapping stays, until the last view is gone.
        """
        self._memory = None
        self._let_go()


def has_owner(name: str, directory: Path = SHM_DIRECTORY) -> bool:
    """Whether a living process owns the segment of that name.

    Raises:
        RemoteProtocolError: a name that no segment can have.
    """
    if not NAME_PATTERN.fullmatch(name):
        raise RemoteProtocolError(f"arena name: expected {NAME_PATTERN.pattern}, got {name[:80]!r}")
    try:
        descriptor = _open(directory / name, os.O_RDONLY)
    except OSError:
        return False
    try:
        return not _try_lock(descriptor)
    finally:
        os.close(descriptor)


def sweep_stale_segments(directory: Path = SHM_DIRECTORY) -> list[str]:
    """Remove this user's segments that no living process owns; the names of those removed.

    Raises:
        OSError: the directory cannot be read.
    """
    swept = []
    for name in os.listdir(directory):
        if not NAME_PATTERN.fullmatch(name):
            continue
        path = directory / name
        try:
            descriptor = _open(path, os.O_RDONLY)
        except OSError as error:  # another user's, or gone since
            logger.debug("segment %s is left alone: %s", path, error)
            continue
        try:
            status = os.fstat(descriptor)
            ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
            # A segment just created and not yet locked can be taken for a stale one here; its
            # creator notices and makes another.
            if ours and _try_lock(descriptor) and _is_same_file(path, descriptor):
                path.unlink(missing_ok=True)
                swept.append(name)
        finally:
            os.close(descriptor)
    if swept:
        logger.info("removed %d arenas that dead processes had left in %s", len(swept), directory)
    return swept


def _create_locked(directory: Path) -> tuple[Path, int]:
    for _ in range(_CREATE_ATTEMPTS):
        path = directory / f"lmcache_kernels_{secrets.token_hex(16)}"
        descriptor = _open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        if _try_lock(descriptor) and _is_same_file(path, descriptor):
            return path, descriptor
        os.close(descriptor)  # a sweeper has it and removes the file
    raise OSError(errno.EBUSY, f"{_CREATE_ATTEMPTS} new segments were removed by others at once")


def _open(path: Path, flags: int) -> int:
    # O_NONBLOCK: opening what turns out to be a pipe must not wait.
    return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_same_file(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.lstat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _let_go(memory: mmap.mmap, descriptor: int, owned: Path | None, creator: int) -> None:
    if owned is not None and os.getpid() == creator:  # a forked child must not remove it
        owned.unlink(missing_ok=True)
    try:
        memory.close()
    except BufferError:
        logger.debug("an arena is still being viewed; its mapping goes with the last view")
    os.close(descriptor)
